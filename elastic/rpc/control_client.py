"""The gRPC client of agents and of the command line; opens a new channel for the next call when
certificates were replaced.
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

_LEAST_LOOK_S = 0.5  # to find out why there was no answer

OPTIONS = [  # for both ends: how each notices a lost peer, and what it refuses
    # For a larger message the sender gets an error, and the receiver only sees the stream end.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # Either end notices a silent peer within 0.5 + 1 s.
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # keepalive_timeout_ms alone is ignored by grpc core
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
    # A repaired link is used again within a second, however long it was cut: by default each
    # attempt to connect lasts 20 s, and the pauses between attempts grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # https_proxy is for the internet, not for a job's nodes
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ("grpc.server_handshake_timeout_ms", 10_000),  # for a client that connects and sends nothing
]
LET_IN = "elastic-let-in"
"""A key in the initial metadata of the coordinator's answer: the agent may attend."""


class CoordinatorLost(TransientError):
    """The stream to the coordinator has ended."""


class CoordinatorRefused(ConfigurationError):
    """The first connection failed for a lasting reason, such as the certificates."""


class ControlClient:
    """Calls the coordinator at `address`; each connection uses the newest certificate.

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
        self._let_in = False  # ever: from then on no failure is final

    async def attend(
        self, outgoing: AsyncIterator[pb.AgentMessage]
    ) -> AsyncIterator[pb.CoordinatorMessage]:
        """Send `outgoing` and yield the answers; raises CoordinatorLost when the stream ends.

        Raises ConfigurationError if the first connection cannot succeed as configured.
        """
        async with self._channels.channel() as channel:
            call = _stub(channel).Attend(_Sendable(outgoing, self._report))
            try:
                # A refusal ends the call. Its metadata are then empty, and may arrive before its
                # status.
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
        """Have the job saved and ended. Raises as `status`."""
        request = pb.StopRequest(reason=reason, exit_code=exit_code)
        await self._ask("Stop", request, timeout_s)

    async def drain(self, node: str, reason: str, timeout_s: float, *, future: bool = False) -> str:
        """Have a node leave and keep it out; returns in words what follows. Raises as `status`."""
        request = pb.DrainRequest(node=node, reason=reason, future=future)
        reply = await self._ask("Drain", request, timeout_s)
        return str(reply.message)

    async def clear(self, node: str, timeout_s: float) -> str:
        """Let a node take part again; returns in words what follows. Raises as `status`."""
        reply = await self._ask("Clear", pb.ClearRequest(node=node), timeout_s)
        return str(reply.message)

    async def stacks(self, of: str, timeout_s: float) -> stacks_pb2.JobStacks:
        """The Python stacks of all ranks, or of one. Raises as `status`."""
        named = of.encode(errors="replace").decode()  # a command line argument may not be UTF-8
        request = stacks_pb2.GetStacksRequest(of=named)
        reply: stacks_pb2.JobStacks = await self._ask("GetStacks", request, timeout_s)
        return reply

    async def incidents(self, number: int | None, timeout_s: float) -> list[str]:
        """All that is known of an incident as JSON; 0: the newest one; None: all in brief. Raises
        as `status`."""
        reply = await self._ask("GetIncidents", pb.GetIncidentsRequest(number=number), timeout_s)
        return list(reply.json)

    async def timeline(self, steps: int, timeout_s: float) -> timeline_pb2.JobTimeline:
        """What each slot did in the last minutes, with at most `steps` steps of each worker.
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
        with contextlib.suppress(asyncio.CancelledError):
            await self._channels.close()

    async def _why(self, error: grpc.aio.AioRpcError, within_s: float | None = None) -> str:
        """The reason in words, found in `within_s` at most; raises CoordinatorRefused if only a
        change of configuration helps."""
        details = str(error.details())
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            lasting = details
        elif error.code() is grpc.StatusCode.UNAVAILABLE and not _nobody_listens(details):
            try:
                async with timeout(within_s):
                    lasting = await explain(self._address, self._security)
            except asyncio.TimeoutError:  # the coordinator is silent
                lasting = ""
        else:
            return details
        if lasting and not self._let_in:
            raise CoordinatorRefused(f"{self._address}: {lasting}") from error
        return lasting or details


class _Sendable(AsyncIterator[pb.AgentMessage]):
    """Drops messages that are too large: one of them would end the stream, and so lose the node.

    Not a generator: gRPC may still wait in it when the call is dropped.
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


def _nobody_listens(details: str) -> bool:
    """Nobody listens there: the most common failure, which a probe could not explain better."""
    return "Connection refused" in details or "No such file" in details


class _Channel:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel
        self.users = 0


class Channels:
    """The current channel of a ControlClient, opened at the first call and replaced when the
    certificate was. Raises ConfigurationError for an unprotected address."""

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
        """The channel for one call. A replaced channel is closed after its last call.

        Raises ConfigurationError if there is no usable certificate.
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
        """Close the channel; cancels calls in progress."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.grpc.close()

    async def _look(self) -> OwnCertificate | None:
        """The newest certificate. Another thread reads its files."""
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
