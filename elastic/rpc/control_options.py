"""How both ends of the gRPC hop notice that the other is gone, and what they do not take."""

from __future__ import annotations

OPTIONS = [
    # Larger ones are cut off unseen: the sender is told, the receiver sees a stream that ends.
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),  # keepalive_timeout_ms alone is ignored by grpc core
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ("grpc.server_handshake_timeout_ms", 10_000),  # for whoever connects and says nothing
]
