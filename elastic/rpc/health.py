"""Serves grpc.health.v1, which load balancers and probes that speak gRPC ask for.

The messages come from gRPC's own package, the servicer does not: in gRPC's servicer a client that
stops watching takes updates away from others, and a client that does not read blocks every change.
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
"""Seconds for which an answer of the daemon is reused: the daemon may ask etcd."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks for clients that watch."""

_SERVICE = "grpc.health.v1.Health"
_SERVING: int = pb.HealthCheckResponse.SERVING
_NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING


class Health:
    """Answers SERVING while `why_not_ready` is empty, for the server and for each service."""

    def __init__(self, why_not_ready: Callable[[], Awaitable[str]], *services: str) -> None:
        self._why_not_ready = why_not_ready
        self._services = frozenset({"", *services})
        self._asked: asyncio.Future[int] | None = None
        self._answered_at = 0.0

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler to add to a gRPC server on this event loop."""
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
            await asyncio.Future()  # the protocol allows it to appear later; here it does not
        told = None
        while True:
            if (status := await self._status()) != told:
                told = status
                yield pb.HealthCheckResponse(status=status)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _status(self) -> int:
        """Concurrent requests share one answer."""
        asked = self._asked
        if asked is None or (asked.done() and time.monotonic() - self._answered_at >= FRESH_S):
            asked = self._asked = asyncio.ensure_future(self._ask())
        return await asyncio.shield(asked)

    async def _ask(self) -> int:
        try:
            reason = await self._why_not_ready()
        except Exception:  # noqa: BLE001 - this is not the place to report it
            reason = "it failed to say"
        self._answered_at = time.monotonic()
        return _NOT_SERVING if reason else _SERVING
