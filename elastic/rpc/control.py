"""The coordinator's gRPC server, to which agents and operators connect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.admission import Admission, MessageRefused
from elastic.rpc.control_client import LET_IN, OPTIONS
from elastic.rpc.handshake_probe import is_served
from elastic.rpc.newest_certificate import server_credentials
from elastic.rpc.refusals import SparingReport
from elastic.rpc.security import (
    PLAINTEXT,
    Report,
    Security,
    Tls,
    is_unix_socket,
    log_report,
    require_protection,
)
from elastic.timeouts import timeout
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc
from elastic.v1 import stacks_pb2, timeline_pb2

CONTROL_SERVICE: str = pb.DESCRIPTOR.services_by_name["Control"].full_name
_HELLO_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 5.0
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "localhost"}
_RESERVED = 512  # descriptors: HTTP has 100 connections, a store some; then there are files
_UNLIMITED = 2**31 - 1
_MOST_UNSENT = 10_000  # messages to an agent that does not read
T = TypeVar("T")


class AgentStream:
    """The coordinator's end of one agent's stream.

    An agent that does not read costs no memory: the stream ends. When the agent reads again it
    comes back, and gets everything again.
    """

    def __init__(self, hello: pb.AgentHello) -> None:
        self.hello = hello
        self.node = hello.node
        self.host = hello.host
        self.slots = hello.slots
        self._outgoing: asyncio.Queue[pb.CoordinatorMessage | bytes | None] = asyncio.Queue()
        self._gave_up = False

    def send(self, **kind: Any) -> None:
        """Send `CoordinatorMessage(**kind)`; never blocks."""
        self._put(pb.CoordinatorMessage(**kind))

    def send_serialized(self, message: bytes) -> None:
        """Send a CoordinatorMessage that others get too; never blocks."""
        self._put(message)

    def close(self) -> None:
        """End the stream after the messages that were sent."""
        self._outgoing.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[pb.CoordinatorMessage | bytes]:
        """The messages to send, until closed."""
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _put(self, message: pb.CoordinatorMessage | bytes) -> None:
        if self._gave_up:
            return
        if self._outgoing.qsize() >= _MOST_UNSENT:
            self._gave_up = True
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
            self._outgoing.put_nowait(None)
            return
        self._outgoing.put_nowait(message)


class AgentHandler(Protocol):
    """How a leader handles the streams of its agents; called on the event loop.

    The agent is told what a method raises, and its stream ends.
    """

    def agent_connected(self, stream: AgentStream) -> None:
        """Handle an agent that has said hello."""
        ...

    def agent_said(self, stream: AgentStream, message: pb.AgentMessage) -> None:
        """Handle a message other than hello."""
        ...

    def agent_lost(self, stream: AgentStream) -> None:
        """Handle the end of a stream. This is called, too, if `agent_connected` raised."""
        ...


class OperatorHandler(Protocol):
    """How a leader answers operators; the caller is told what a method raises."""

    def stop(self, reason: str, exit_code: int) -> None:
        """Have the job saved and ended with this exit code."""
        ...

    async def drain(self, name: str, reason: str, *, future: bool) -> str:
        """Have a node leave and keep it out; return in words what follows.

        Raises TransientError, and ConfigurationError if no node can have the name.
        """
        ...

    async def clear(self, name: str) -> str:
        """Let a node take part again; return in words what follows.

        Raises TransientError, and ConfigurationError if the name is ambiguous or impossible.
        """
        ...

    async def stacks(self, of: str) -> stacks_pb2.JobStacks:
        """The Python stacks of all ranks, or of this rank or worker. Raises ConfigurationError if
        there is no such rank or worker."""
        ...

    async def log(self, of: str) -> str:
        """The last log lines of a worker, given its rank or name, for the page."""
        ...

    async def timeline(self, steps: int) -> timeline_pb2.JobTimeline:
        """What each slot did in the last minutes, with at most `steps` steps of each worker."""
        ...


class ControlHandler(Protocol):
    """What the coordinator's server needs from the daemon; called on the event loop.

    The caller is told what a method raises.
    """

    def agents(self) -> AgentHandler | None:
        """The handler for the whole stream of an agent that connects now; None: not the leader."""
        ...

    def operators(self) -> OperatorHandler:
        """The handler for operators. Raises TransientError if this coordinator does not lead."""
        ...

    def status(self) -> pb.JobStatus: ...

    def incidents(self, number: int | None) -> list[str]:
        """All that is known of an incident as JSON; 0: the newest one; None: all in brief. Raises
        ConfigurationError if there is no such incident."""
        ...

    def follow_events(self, *, follow: bool) -> AsyncIterator[str]:
        """The journal as JSON lines: the remembered entries, then new ones if `follow`."""
        ...


class _Servicer(pb_grpc.ControlServicer):
    def __init__(self, handler: ControlHandler, report: Report) -> None:
        self._handler = handler
        self._report = report

    async def Attend(  # noqa: N802 - named by the protocol
        self,
        request_iterator: AsyncIterator[pb.AgentMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        try:
            stream = AgentStream(await _hello(request_iterator))
        except MessageRefused as error:
            self._refused(context.peer(), error)
            await context.abort(error.code, str(error))
        if (leader := self._handler.agents()) is None:
            await context.send_initial_metadata(((LET_IN, "1"),))
            return  # the agent looks for the leader again
        try:
            await self._guarded(context, stream.node, lambda: leader.agent_connected(stream))
            await self._converse(leader, stream, request_iterator, context)
        finally:
            self._lost(leader, stream)

    async def _converse(
        self,
        leader: AgentHandler,
        stream: AgentStream,
        messages: AsyncIterator[pb.AgentMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        reading = asyncio.ensure_future(self._read(leader, stream, messages))
        try:
            await context.send_initial_metadata(((LET_IN, "1"),))
            async for message in stream.outgoing():
                await context.write(message)
            if reading.done() and (refusal := reading.result()) is not None:
                await context.abort(refusal.code, str(refusal))
        finally:
            reading.cancel()

    async def _read(
        self,
        leader: AgentHandler,
        stream: AgentStream,
        messages: AsyncIterator[pb.AgentMessage],
    ) -> MessageRefused | None:
        """Pass the agent's messages on. Return None at their end, or why one was not handled."""
        try:
            async for message in messages:
                try:
                    leader.agent_said(stream, message)
                except Exception as error:
                    raise MessageRefused(_failed(error), grpc.StatusCode.INTERNAL) from error
        except MessageRefused as error:
            self._refused(stream.node, error)
            return error
        finally:
            stream.close()
        return None

    def _lost(self, leader: AgentHandler, stream: AgentStream) -> None:
        try:
            leader.agent_lost(stream)
        except Exception as error:  # noqa: BLE001 - no caller is left for gRPC to tell
            self._refused(stream.node, error)

    def _refused(self, source: str, error: Exception) -> None:
        known = isinstance(error, MessageRefused)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        self._report("message_refused", source=source, reason=reason)

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.JobStatus:
        del request
        return await self._guarded(context, "GetStatus", self._handler.status)

    async def Stop(  # noqa: N802
        self, request: pb.StopRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.StopReply:
        leader = await self._operators(context)
        await self._guarded(context, "Stop", lambda: leader.stop(request.reason, request.exit_code))
        return pb.StopReply()

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainReply:
        leader = await self._operators(context)
        reply = leader.drain(request.node, request.reason, future=request.future)
        return pb.DrainReply(message=await self._answered(context, "Drain", reply))

    async def Clear(  # noqa: N802
        self, request: pb.ClearRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClearReply:
        reply = (await self._operators(context)).clear(request.node)
        return pb.ClearReply(message=await self._answered(context, "Clear", reply))

    async def FollowEvents(  # noqa: N802
        self, request: pb.FollowEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.JournalEntry]:
        events = await self._guarded(
            context, "FollowEvents", lambda: self._handler.follow_events(follow=request.follow)
        )
        async for line in events:
            yield pb.JournalEntry(json=line)

    async def GetStacks(  # noqa: N802
        self, request: stacks_pb2.GetStacksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> stacks_pb2.JobStacks:
        stacks = (await self._operators(context)).stacks(request.of)
        return await self._answered(context, "GetStacks", stacks)

    async def GetIncidents(  # noqa: N802
        self, request: pb.GetIncidentsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.JobIncidents:
        number = request.number if request.HasField("number") else None
        found = await self._guarded(
            context, "GetIncidents", lambda: self._handler.incidents(number)
        )
        return pb.JobIncidents(json=found)

    async def GetTimeline(  # noqa: N802
        self, request: timeline_pb2.GetTimelineRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> timeline_pb2.JobTimeline:
        timeline = (await self._operators(context)).timeline(request.steps)
        return await self._answered(context, "GetTimeline", timeline)

    async def _operators(self, context: grpc.aio.ServicerContext[Any, Any]) -> OperatorHandler:
        return await self._guarded(context, "operators", self._handler.operators)

    async def _answered(
        self, context: grpc.aio.ServicerContext[Any, Any], source: str, answer: Awaitable[T]
    ) -> T:
        """Like `_guarded`, for an answer that takes time."""
        try:
            return await answer
        except TransientError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ConfigurationError as error:  # the caller's mistake
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # noqa: BLE001 - told to the caller and to the journal
            self._refused(source, error)
            await context.abort(grpc.StatusCode.INTERNAL, _failed(error))
        raise AssertionError("abort raises")

    async def _guarded(
        self, context: grpc.aio.ServicerContext[Any, Any], source: str, handle: Callable[[], T]
    ) -> T:
        """The answer. The caller is told what the handler raises: gRPC would only log it."""

        async def answer() -> T:
            return handle()

        return await self._answered(context, source, answer())


async def _hello(messages: AsyncIterator[pb.AgentMessage]) -> pb.AgentHello:
    """The first message; raises MessageRefused if it does not come soon or is no hello."""
    try:
        async with timeout(_HELLO_TIMEOUT_S):
            first = await anext(messages, None)
    except asyncio.TimeoutError:
        first = None
    if first is None or not first.HasField("hello"):
        raise MessageRefused(
            "the first message of an agent must be its hello", grpc.StatusCode.INVALID_ARGUMENT
        )
    return first.hello


def _failed(error: Exception) -> str:
    return f"the coordinator cannot handle this: {type(error).__name__}: {error}"


class ControlServer:
    """Listens at `address`: "unix:/path" or "HOST:PORT".

    `report` takes what the journal should know: refused peers and messages, replaced certificates,
    warnings. `beside` are more services at the same address, behind the same checks. Raises
    ConfigurationError for plain text that other machines could reach.
    """

    def __init__(
        self,
        handler: ControlHandler,
        address: str,
        *,
        security: Security = PLAINTEXT,
        report: Report = log_report,
        beside: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        require_protection(address, security, report)
        refusals = SparingReport(report)
        admission = Admission(security, refusals)
        options = [*OPTIONS, ("grpc.max_allowed_incoming_connections", _most_connections())]
        self._server = grpc.aio.server(options=options, interceptors=[admission])
        pb_grpc.add_ControlServicer_to_server(_Servicer(handler, refusals), self._server)  # type: ignore[no-untyped-call]
        self._server.add_generic_rpc_handlers(tuple(beside))
        self._address = address
        self._security = security
        self._report = report

    async def start(self) -> str:
        """Listen; return the address, with the chosen port if it was 0.

        Raises ConfigurationError if the address or a certificate cannot be used, and TransientError
        for a Unix socket, whose path elastic itself chooses.
        """
        try:
            port = self._add_port()
        except RuntimeError as error:
            raise _not_listening(self._address) from error
        if port == 0 and not is_unix_socket(self._address):
            raise _not_listening(self._address)
        await self._server.start()
        if not is_unix_socket(self._address):
            self._address = f"{self._address.rpartition(':')[0]}:{port}"
        return self._address

    async def until_unreachable(self) -> None:
        """Return when two looks in a row find that the server takes no connection any more.

        gRPC closes its acceptor for good when accept(2) fails with any error but EMFILE, such as
        ENFILE when the whole machine has no file left for a moment. Agents would then wait forever.
        """
        host, _, port = self._address.rpartition(":")
        own = self._address if is_unix_socket(self._address) else f"{_ANY.get(host, host)}:{port}"
        misses = 0
        while misses < 2:
            await asyncio.sleep(_LOOK_EVERY_S if misses == 0 else 1.0)
            misses = 0 if await is_served(own, self._security) else misses + 1

    async def stop(self, grace_s: float) -> None:
        """Close; streams get `grace_s` seconds to end."""
        await self._server.stop(grace_s)

    def _add_port(self) -> int:
        with _only_this_user():
            if isinstance(self._security, Tls):
                credentials = server_credentials(self._security, self._report)
                port: int = self._server.add_secure_port(self._address, credentials)
            else:
                port = self._server.add_insecure_port(self._address)
        return port


def _most_connections() -> int:
    """The connections that leave _RESERVED descriptors for all else: gRPC closes others at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else max(soft // 2, soft - _RESERVED)


@contextlib.contextmanager
def _only_this_user() -> Iterator[None]:
    """A Unix socket made here is only for this user. Applies to the whole process: do not await."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _not_listening(address: str) -> ConfigurationError | TransientError:
    """The likely reasons, since gRPC gives none."""
    if is_unix_socket(address):
        return TransientError(
            f"cannot listen at {address}: there may be no file descriptors left (see `ulimit -n`), "
            "or its directory is gone; try again"
        )
    return ConfigurationError(
        f"cannot listen at {address}: the port is in use, or the host is not this machine's; "
        "choose another with --listen HOST:PORT, or leave the option out"
    )
