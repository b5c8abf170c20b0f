"""grpc.health.v1: what balancers and probes that speak gRPC ask for, beside the daemon's services.

The messages are those of gRPC's own package, its servicer is not: there, one who stops to watch
takes the others' news away, and one who reads nothing holds up every change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb

FRESH_S = 0.5
"""For which an answer of the daemon holds: it may ask etcd."""
LOOK_EVERY_S = 1.0
"""For those who watch."""

_SERVICE = "grpc.health.v1.Health"
_SERVING: int = pb.HealthCheckResponse.SERVING
_NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING


class Health:
    """Serving while nothing says why not; of the whole server, and of each of the services."""

    def __init__(self, why_not_ready: Callable[[], Awaitable[str]], *services: str) -> None:
        self._why_not_ready = why_not_ready
        self._services = frozenset({"", *services})
        self._asked: asyncio.Future[int] | None = None
        self._answered_at = 0.0

    def handler(self) -> grpc.GenericRpcHandler:
        """For a gRPC server on this event loop."""
        serializers: dict[str, Any] = {
            "request_deserializer": pb.HealthCheckRequest.FromString,
            "response_serializer": pb.HealthCheckResponse.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **serializers),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **serializers),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    async def _check(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            message = f"no service {request.service!r} here"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return pb.HealthCheckResponse(status=await self._status())

    async def _watch(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        del context
        if request.service not in self._services:
            yield pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
            await asyncio.Future()  # it may come, says the protocol; here it does not
        told = None
        while True:
            if (status := await self._status()) != told:
                told = status
                yield pb.HealthCheckResponse(status=status)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _status(self) -> int:
        """All who ask at once share an answer."""
        asked = self._asked
        if asked is None or (asked.done() and time.monotonic() - self._answered_at >= FRESH_S):
            asked = self._asked = asyncio.ensure_future(self._ask())
        return await asyncio.shield(asked)

    async def _ask(self) -> int:
        try:
            reason = await self._why_not_ready()
        except Exception:  # noqa: BLE001 - whatever it is, this is not the place to tell of it
            reason = "it failed to say"
        self._answered_at = time.monotonic()
        return _NOT_SERVING if reason else _SERVING
