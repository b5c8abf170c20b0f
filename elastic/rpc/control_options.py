"""How both ends of the gRPC hop notice that the other is gone, and what they do not take."""

from __future__ import annotations

OPTIONS = [
    # Larger ones are cut off unseen: the sender is told, the receiver sees a stream that ends.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # Either end notices within 0.5 + 1 s that the other is silent.
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # keepalive_timeout_ms alone is ignored by grpc core
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
    # A link that is healed is used again within a second, however long it was cut: by default each
    # attempt to connect lasts 20 s, and the pauses between them grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # https_proxy is for the world outside, not among a job's nodes
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ("grpc.server_handshake_timeout_ms", 10_000),  # for a client that connects and says nothing
]

LET_IN = "elastic-let-in"
"""In the initial metadata of the coordinator's answer to an agent that may attend."""
