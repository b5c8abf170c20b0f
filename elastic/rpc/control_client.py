"""The agent's and the command line's end of the gRPC hop. Its channel is made anew for the next
call when the certificates were replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.rpc.admission import MOST_BYTES
from elastic.rpc.certificates import OwnCertificate, Role
from elastic.rpc.handshake_probe import explain
from elastic.rpc.identity import coordinator_identity
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import (
    PLAINTEXT,
    Report,
    Security,
    Tls,
    log_report,
    on_this_loop,
    require_protection,
)
from elastic.timeouts import timeout
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc
from elastic.v1 import stacks_pb2, timeline_pb2

_LEAST_LOOK_S = 0.5  # for why there was no answer

OPTIONS = [  # of both ends: how each notices that the other is gone, and what it does not take
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


class CoordinatorLost(TransientError):
    """The stream to the coordinator has ended."""


class CoordinatorRefused(ConfigurationError):
    """The first connection failed for a reason that stays, such as the certificates."""


class ControlClient:
    """Speaks to the coordinator at `address`, at each connection with the newest certificate.

    `report` takes what the journal should know. Raises ConfigurationError for plain text to another
    machine.
    """

    def __init__(
        self, address: str, *, security: Security = PLAINTEXT, report: Report = log_report
    ) -> None:
        self._address = address
        self._security = security
        self._report = report
        self._channels = Channels(address, security, report)
        self._let_in = False  # once: from then on everything may become well again by itself

    async def attend(
        self, outgoing: AsyncIterator[pb.AgentMessage]
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        """Send `outgoing`, yield what comes back; raises CoordinatorLost when it ends.

        Raises ConfigurationError if the first connection cannot succeed as things are.
        """
        async with self._channels.channel() as channel:
            call = _stub(channel).Attend(_Sendable(outgoing, self._report))
            try:
                # A refusal ends the call, which may come to be known later than its metadata, that
                # are empty then.
                if any(key == LET_IN for key, _ in await call.initial_metadata()):
                    self._let_in = True
                async for message in call:
                    yield message
            except grpc.aio.AioRpcError as error:
                text = f"{self._address}: {await self._why(error)}"
                raise CoordinatorLost(text) from error
            finally:
                call.cancel()
        raise CoordinatorLost(f"{self._address}: the coordinator closed the stream")

    async def status(self, timeout_s: float) -> pb.JobStatus:
        """The job's status; raises TransientError, or ConfigurationError as `attend` does."""
        reply: pb.JobStatus = await self._ask("GetStatus", pb.GetStatusRequest(), timeout_s)
        return reply

    async def stop(self, reason: str, exit_code: int, timeout_s: float) -> None:
        """Have the job saved and left. Raises as `status`."""
        request = pb.StopRequest(reason=reason, exit_code=exit_code)
        await self._ask("Stop", request, timeout_s)

    async def drain(self, node: str, reason: str, timeout_s: float, *, future: bool = False) -> str:
        """Have a node left and kept out; what follows, in words. Raises as `status`."""
        request = pb.DrainRequest(node=node, reason=reason, future=future)
        reply = await self._ask("Drain", request, timeout_s)
        return str(reply.message)

    async def clear(self, node: str, timeout_s: float) -> str:
        """Let a node take part again; what follows, in words. Raises as `status`."""
        reply = await self._ask("Clear", pb.ClearRequest(node=node), timeout_s)
        return str(reply.message)

    async def stacks(self, of: str, timeout_s: float) -> stacks_pb2.JobStacks:
        """The Python stacks of all ranks, or of one. Raises as `status`."""
        named = of.encode(errors="replace").decode()  # an argument may be no text
        request = stacks_pb2.GetStacksRequest(of=named)
        reply: stacks_pb2.JobStacks = await self._ask("GetStacks", request, timeout_s)
        return reply

    async def incidents(self, number: int | None, timeout_s: float) -> list[str]:
        """All that is known of an incident as JSON, of the newest one for 0; of all in brief for
        None. Raises as `status`."""
        reply = await self._ask("GetIncidents", pb.GetIncidentsRequest(number=number), timeout_s)
        return list(reply.json)

    async def timeline(self, steps: int, timeout_s: float) -> timeline_pb2.JobTimeline:
        """What each slot did in the last minutes, with so many steps of each worker at most.
        Raises as `status`."""
        request = timeline_pb2.GetTimelineRequest(steps=steps)
        reply: timeline_pb2.JobTimeline = await self._ask("GetTimeline", request, timeout_s)
        return reply

    async def events(self, *, follow: bool) -> AsyncIterator[str]:
        """The journal as JSON lines. Raises as `status`, also when the stream breaks."""
        async with self._channels.channel() as channel:
            call = _stub(channel).FollowEvents(pb.FollowEventsRequest(follow=follow))
            try:
                async for entry in call:
                    self._let_in = True
                    yield entry.json
            except grpc.aio.AioRpcError as error:
                raise await self._no_answer(error) from error
            finally:
                call.cancel()

    async def _ask(self, method: str, request: Any, timeout_s: float) -> Any:
        ends_at = time.monotonic() + timeout_s
        async with self._channels.channel() as channel:
            try:
                reply = await getattr(_stub(channel), method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                left_s = max(ends_at - time.monotonic(), _LEAST_LOOK_S)
                raise await self._no_answer(error, left_s) from error
        self._let_in = True
        return reply

    async def _no_answer(
        self, error: grpc.aio.AioRpcError, within_s: float | None = None
    ) -> ElasticError:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return ConfigurationError(str(error.details()))
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return CoordinatorRefused(f"{self._address}: {error.details()}")
        return TransientError(
            f"the coordinator at {self._address} does not answer: "
            f"{await self._why(error, within_s)}; is the job still running?"
        )

    async def close(self) -> None:
        """Close the channel."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._channels.close()

    async def _why(self, error: grpc.aio.AioRpcError, within_s: float | None = None) -> str:
        """In words, after so long a time at most; raises CoordinatorRefused where only a change of
        configuration helps."""
        said = str(error.details())
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            lasting = said
        elif error.code() is grpc.StatusCode.UNAVAILABLE and not _nobody_there(said):
            try:
                async with timeout(within_s):
                    lasting = await explain(self._address, self._security)
            except asyncio.TimeoutError:  # it is silent
                lasting = ""
        else:
            return said
        if lasting and not self._let_in:
            raise CoordinatorRefused(f"{self._address}: {lasting}") from error
        return lasting or said


class _Sendable(AsyncIterator[pb.AgentMessage]):
    """One message too many bytes long must not cost the stream, and with it the node.

    No generator: gRPC may still wait in it when the call is let go.
    """

    def __init__(self, outgoing: AsyncIterator[pb.AgentMessage], report: Report) -> None:
        self._outgoing = outgoing
        self._report = report

    async def __anext__(self) -> pb.AgentMessage:
        while True:
            message = await self._outgoing.__anext__()
            if (size_bytes := message.ByteSize()) <= MOST_BYTES:
                return message
            kind = message.WhichOneof("kind")
            reason = f"{kind} of {size_bytes} bytes; at most {MOST_BYTES} can be sent"
            self._report("message_dropped", reason=reason)


def _stub(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]


def _nobody_there(details: str) -> bool:
    """Nobody listens: the commonest of failures, in which there is nothing to look into."""
    return "Connection refused" in details or "No such file" in details


class _Channel:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel
        self.users = 0


class Channels:
    """Opens nothing before the first call. Raises ConfigurationError for an unprotected address."""

    def __init__(self, address: str, security: Security, report: Report) -> None:
        require_protection(address, security, report)
        self._address = address
        self._channel: _Channel | None = None
        self._certificate: NewestCertificate | None = None
        if isinstance(security, Tls):
            self._certificate = NewestCertificate(security, Role.CLIENT, on_this_loop(report))
            self._job = security.job
        self._shown: OwnCertificate | None = None

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """For one call. A channel that another has replaced is closed after its last call.

        Raises ConfigurationError if there is no certificate that can be used.
        """
        newest = await self._look()
        replaced = self._channel
        used = self._showing(newest)
        used.users += 1
        if replaced is not None and replaced is not used and replaced.users == 0:
            await replaced.grpc.close()
        try:
            yield used.grpc
        finally:
            used.users -= 1
            if used is not self._channel and used.users == 0:
                await used.grpc.close()

    async def close(self) -> None:
        """Cancel what is going on."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.grpc.close()

    async def _look(self) -> OwnCertificate | None:
        """The newest certificate. Its files are read beside the loop."""
        if self._certificate is None:
            return None
        return await asyncio.to_thread(self._certificate.get)

    def _showing(self, newest: OwnCertificate | None) -> _Channel:
        if self._channel is None or newest is not self._shown:
            self._channel, self._shown = _Channel(self._open(newest)), newest
        return self._channel

    def _open(self, certificate: OwnCertificate | None) -> grpc.aio.Channel:
        if certificate is None:
            return grpc.aio.insecure_channel(self._address, options=OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=certificate.contents.ca,
            private_key=certificate.contents.key,
            certificate_chain=certificate.contents.certificate,
        )
        name = coordinator_identity(certificate.dns_names, self._job)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(self._address, credentials, options=options)
