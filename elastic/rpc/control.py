"""The gRPC hop: the coordinator's server, and the agent's and command line's clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from elastic.errors import ConfigurationError, TransientError
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc

_OPTIONS = [
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
]


class AgentStream:
    """The coordinator's end of one agent's stream."""

    def __init__(self, hello: pb.AgentHello) -> None:
        self.node = hello.node
        self.host = hello.host
        self.slots = hello.slots
        self._outgoing: asyncio.Queue[pb.CoordinatorMessage | None] = asyncio.Queue()

    def send(self, **kind: Any) -> None:
        """Send `CoordinatorMessage(**kind)`; never blocks."""
        self._outgoing.put_nowait(pb.CoordinatorMessage(**kind))

    def close(self) -> None:
        """End the stream after what was sent."""
        self._outgoing.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[pb.CoordinatorMessage]:
        """What is to be sent, until closed."""
        while (message := await self._outgoing.get()) is not None:
            yield message


class ControlHandler(Protocol):
    """What the coordinator does with what arrives; called on its event loop."""

    def agent_connected(self, stream: AgentStream) -> None:
        """An agent has said hello."""
        ...

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        """It says something else."""
        ...

    def agent_lost(self, stream: AgentStream) -> None:
        """Its stream has ended."""
        ...

    def status(self) -> pb.JobStatus:
        """The job's status."""
        ...

    def stop(self, reason: str, exit_code: int) -> None:
        """Somebody wants the job saved and left."""
        ...


class _Servicer(pb_grpc.ControlServicer):
    def __init__(self, handler: ControlHandler) -> None:
        self._handler = handler

    async def Attend(  # noqa: N802 - named by the protocol
        self,
        request_iterator: AsyncIterator[pb.AgentMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an agent says hello first")
            return
        stream = AgentStream(first.hello)
        self._handler.agent_connected(stream)
        reading = asyncio.ensure_future(self._read(stream, request_iterator))
        try:
            async for message in stream.outgoing():
                yield message
        finally:
            reading.cancel()
            self._handler.agent_lost(stream)

    async def _read(self, stream: AgentStream, messages: AsyncIterator[pb.AgentMessage]) -> None:
        try:
            async for message in messages:
                self._handler.agent_said(stream, message)
        finally:
            stream.close()

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.JobStatus:
        del request, context
        return self._handler.status()

    async def Stop(  # noqa: N802
        self, request: pb.StopRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StopReply:
        del context
        self._handler.stop(request.reason, request.exit_code)
        return pb.StopReply()


class ControlServer:
    """Listens at `address`: "unix:/path" or "HOST:PORT"."""

    def __init__(self, handler: ControlHandler, address: str) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        pb_grpc.add_ControlServicer_to_server(_Servicer(handler), self._server)  # type: ignore[no-untyped-call]
        self._address = address

    async def start(self) -> str:
        """Listen; return the address, with the port that was chosen if it was 0."""
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise _not_listening(self._address) from error
        if port == 0 and not self._address.startswith("unix:"):
            raise _not_listening(self._address)
        await self._server.start()
        if self._address.startswith("unix:"):
            return self._address
        return f"{self._address.rpartition(':')[0]}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Close; streams get `grace_s` seconds to end."""
        await self._server.stop(grace_s)


def _not_listening(address: str) -> ConfigurationError:
    return ConfigurationError(
        f"can not listen at {address}: the port is in use, or the host is not this machine's; "
        "choose another with --listen HOST:PORT, or leave the option out"
    )


class CoordinatorLost(TransientError):
    """The stream to the coordinator has ended."""


class ControlClient:
    """A channel to the coordinator at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = pb_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]

    async def attend(
        self, outgoing: AsyncIterator[pb.AgentMessage]
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        """Send `outgoing`, yield what comes back; raises CoordinatorLost when it ends."""
        call = self._stub.Attend(outgoing)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise CoordinatorLost(f"{self._address}: {error.details()}") from error
        raise CoordinatorLost(f"{self._address}: the coordinator closed the stream")

    async def status(self, timeout_s: float) -> pb.JobStatus:
        """The job's status; raises TransientError."""
        try:
            reply: pb.JobStatus = await self._stub.GetStatus(
                pb.GetStatusRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise TransientError(
                f"the coordinator at {self._address} does not answer: {error.details()}; is the "
                "job still running?"
            ) from error
        return reply

    async def close(self) -> None:
        """Close the channel."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._channel.close()
