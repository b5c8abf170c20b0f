"""A proxy in front of a real etcd, which reports another version or answers late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.connection import STATUS


class _Front(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.Channel, version: str, delay_s: float) -> None:
        self._channel = channel
        self._version = version
        self._delay_s = delay_s

    def service(self, call: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda r, c: self._pass_on(call, r, c))

    def _pass_on(self, call: Any, request: bytes, context: grpc.ServicerContext) -> bytes:
        time.sleep(self._delay_s)
        forward = self._channel.unary_unary(call.method)
        try:
            answer: bytes = forward(request, metadata=call.invocation_metadata, timeout=5.0)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())  # type: ignore[attr-defined]
        if call.method != STATUS.path:
            return answer
        status = pb.StatusResponse.FromString(answer)
        status.version = self._version
        return status.SerializeToString()


@contextlib.contextmanager
def etcd_front(
    address: str, *, host: str = "127.0.0.1", version: str = "3.5.23", delay_s: float = 0.0
) -> Iterator[str]:
    """The proxy's HOST:PORT. It passes only unary calls on to `address`."""
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, handlers=[_Front(channel, version, delay_s)])
        port = server.add_insecure_port(f"{host}:0")
        server.start()
        try:
            yield f"{host}:{port}"
        finally:
            server.stop(None).wait()
