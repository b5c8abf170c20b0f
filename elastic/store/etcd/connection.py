"""Connects to members: channels, certificates, tokens, the methods that are called, failover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from elastic.errors import ConfigurationError
from elastic.settings.tls_files import TlsFiles, usable_tls_files
from elastic.store.etcd import refusals
from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.endpoints import Endpoint
from elastic.store.etcd.refusals import (
    ANOTHER_MAY_ANSWER,
    Refusal,
    RefusalReason,
    Refused,
    reason_of_status,
)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One method of etcd's API: its name and its messages."""

    name: str
    request: type[RequestT]
    response: type[ResponseT]

    @property
    def path(self) -> str:
        return f"/etcdserverpb.{self.name}"


RANGE = Method("KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("KV/Txn", pb.TxnRequest, pb.TxnResponse)
LEASE_GRANT = Method("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = Method("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = Method(
    "Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
WATCH = Method("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
AUTHENTICATE = Method("Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
STATUS = Method("Maintenance/Status", pb.StatusRequest, pb.StatusResponse)

READS = frozenset(method.name for method in (RANGE, WATCH, STATUS))


Metadata = tuple[tuple[str, str], ...]

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.keepalive_time_ms", 10_000),  # etcd cuts off clients that ping more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # keepalive_timeout_ms alone is ignored by grpc core
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # the most that opening a connection may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # new certificates need a new connection
    ("grpc.enable_http_proxy", 0),  # https_proxy is for the internet
]


class Channel:
    """A channel that several calls share; after `leave` the end of the last call closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel
        self._users = 0
        self._left = False

    def enter(self) -> None:
        self._users += 1

    async def exit(self) -> None:
        self._users -= 1
        await self._close_if_unused()

    async def leave(self) -> None:
        """Close the channel after its last call: none begins any more."""
        self._left = True
        await self._close_if_unused()

    async def _close_if_unused(self) -> None:
        if self._left and self._users == 0:
            await self.grpc.close()


class Connection:
    """The connection to one member: opened at the first call, and again after a failure if
    certificate files changed."""

    def __init__(self, endpoint: Endpoint, tls: TlsFiles | None) -> None:
        self.endpoint = endpoint
        self._files = (tls or TlsFiles()) if endpoint.tls else None
        self._fingerprint: Fingerprint = ()
        self._channel: Channel | None = None
        self._failed = False

    async def ask(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        metadata: Metadata,
        timeout_s: float,
    ) -> ResponseT:
        """Send one request for one answer; raises Refused."""
        channel = self._open()
        call = channel.grpc.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        channel.enter()
        try:
            answer: ResponseT = await call(request, metadata=metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            reason = reason_of_status(error.code(), error.details())
        else:
            return answer
        finally:
            await channel.exit()
        raise Refused(reason)

    def stream(
        self,
        method: Method[RequestT, ResponseT],
        *,
        metadata: Metadata,
        timeout_s: float | None = None,
    ) -> Stream[RequestT, ResponseT]:
        """Open a stream of requests and answers; the caller closes it."""
        channel = self._open()
        call = channel.grpc.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return Stream(channel, call(metadata=metadata, timeout=timeout_s))

    def failed(self) -> None:
        """Note that the member did not answer, for `refresh`."""
        self._failed = True

    async def refresh(self) -> None:
        """After a failure, open a new channel if certificate files were replaced."""
        failed, self._failed = self._failed, False
        if not failed or self._files is None:
            return
        try:
            if self._fingerprint == await asyncio.to_thread(fingerprint, self._files):
                return
            await asyncio.to_thread(credentials, self._files)
        except (ConfigurationError, RuntimeError):
            return  # half replaced, or no thread left: try after the next failure
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.leave()

    async def close(self) -> None:
        """Close the channel; cancels calls in progress."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.grpc.close()

    def _open(self) -> Channel:
        if self._channel is None:
            self._channel = Channel(self._new_channel())
        return self._channel

    def _new_channel(self) -> grpc.aio.Channel:
        target = self.endpoint.target
        if self._files is None:
            return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._fingerprint = fingerprint(self._files)
        return grpc.aio.secure_channel(target, credentials(self._files), options=_CHANNEL_OPTIONS)


class Stream(Generic[RequestT, ResponseT]):
    """A bidirectional call. A read that timed out goes on in the next `receive`."""

    def __init__(self, channel: Channel, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        channel.enter()
        self._channel = channel
        self._call = call
        self._reading: asyncio.Future[ResponseT] | None = None

    async def send(self, request: RequestT, *, timeout_s: float) -> None:
        """Raises Refused, also after `timeout_s`."""
        # Not with wait_for: before Python 3.12 it may swallow a cancellation.
        writing = asyncio.ensure_future(self._call.write(request))
        writing.add_done_callback(_look_at)
        try:
            done, _ = await asyncio.wait({writing}, timeout=timeout_s)
        finally:
            writing.cancel()
        if not done:
            raise Refused(RefusalReason(Refusal.UNREACHABLE, "it accepts no requests"))
        error = writing.exception()
        if isinstance(error, (grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            raise Refused(await self._ended())
        if error is not None:
            raise error

    async def receive(self, *, timeout_s: float) -> ResponseT | None:
        """The next message, or None if nothing came in time; raises Refused."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(_look_at)
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            return None
        reading, self._reading = self._reading, None
        message: Any = grpc.aio.EOF if reading.exception() is not None else reading.result()
        if message is grpc.aio.EOF:
            raise Refused(await self._ended())
        received: ResponseT = message
        return received

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
        await self._channel.exit()

    async def _ended(self) -> RefusalReason:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return RefusalReason(Refusal.UNREACHABLE, "it ended the stream")
        return reason_of_status(code, await self._call.details())


def _look_at(reading: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it if nobody else does."""
    if not reading.cancelled():
        reading.exception()


Fingerprint = tuple[tuple[int, int, int] | None, ...]


def credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """The credentials for a channel; raises ConfigurationError that names the unusable file."""
    contents = usable_tls_files(files, "etcd")
    return grpc.ssl_channel_credentials(
        root_certificates=contents.ca,
        private_key=contents.key,
        certificate_chain=contents.certificate,
    )


def fingerprint(files: TlsFiles) -> Fingerprint:
    """A value that changes when a file is replaced."""
    return tuple(_stamp(path) for path in (files.ca, files.certificate, files.key))


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size) if status is not None else None


NEEDS_LEADER: Metadata = (("hasleader", "true"),)
"""Makes a member that is cut off from the others refuse, instead of answering from old data."""
ENDPOINTS = "elastic-endpoints"
"""The metadata key that tells a store how many endpoints the client has: a store in memory must be
the only one. etcd ignores it."""


class Tokens:
    """Keeps the token of all calls and fetches one when needed; without a user there is none."""

    def __init__(self, failover: Failover, *, user: str | None, password: str | None) -> None:
        self._failover = failover
        self._user = user
        self._request = pb.AuthenticateRequest(name=user or "", password=password or "")
        self._token: str | None = None
        self._fetching = asyncio.Lock()

    async def get(self, *, ends_at: float) -> str | None:
        """The token to send; raises Refused and what `Failover.ask` raises."""
        if self._user is None:
            return None
        async with self._fetching:
            if self._token is None:
                answer = await self._failover.ask(
                    AUTHENTICATE.name, self._authenticate, ends_at=ends_at
                )
                self._token = answer.value.token
            return self._token

    def forget(self, token: str | None) -> None:
        if self._token == token:
            self._token = None

    async def _authenticate(
        self, connection: Connection, timeout_s: float
    ) -> pb.AuthenticateResponse:
        return await connection.ask(
            AUTHENTICATE, self._request, metadata=NEEDS_LEADER, timeout_s=timeout_s
        )


def metadata(token: str | None, endpoints: int) -> Metadata:
    """The metadata of every call; `endpoints` is the number of the client's endpoints."""
    always = (*NEEDS_LEADER, (ENDPOINTS, str(endpoints)))
    return always if token is None else (*always, ("token", token))


AnswerT = TypeVar("AnswerT")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Answer(Generic[AnswerT]):
    """An answer; `repeated`: a member asked earlier may already have done the same."""

    value: AnswerT
    repeated: bool


class Failover:
    """Asks one member after another until one answers or the time is up."""

    def __init__(
        self, connections: Sequence[Connection], *, attempt_timeout_s: float, total_timeout_s: float
    ) -> None:
        self._connections = connections
        self._current = 0
        self._attempt_timeout_s = attempt_timeout_s
        self._total_timeout_s = total_timeout_s
        self._last_reasons: dict[Endpoint, RefusalReason] = {}
        """The errors of members since the last answer, also those that other calls got."""
        self.answered = False
        """Whether the cluster has ever fulfilled a call; the client sets it."""

    @property
    def current(self) -> Connection:
        """The member that calls ask first."""
        return self._connections[self._current]

    def ends_at(self) -> float:
        """The deadline of a call made now, in the event loop's time."""
        return asyncio.get_running_loop().time() + self._total_timeout_s

    def move_on(self, failed: Connection) -> None:
        """Ask the next member from now on, unless another call has already moved on."""
        failed.failed()
        if self.current is failed:
            self._current = (self._current + 1) % len(self._connections)

    async def ask(
        self,
        method: str,
        attempt: Callable[[Connection, float], Awaitable[AnswerT]],
        *,
        ends_at: float,
    ) -> Answer[AnswerT]:
        """Call `attempt(connection, timeout_s)` until it answers.

        Raises Refused for a refusal that every other member would repeat, and an error for
        operators if no member answers.
        """
        heard: dict[Endpoint, RefusalReason] = {}
        attempts = 0
        while (left_s := ends_at - asyncio.get_running_loop().time()) > 0:
            connection = self.current
            answer = await self._attempt(attempt, connection, left_s)
            if not isinstance(answer, RefusalReason):
                self._last_reasons.clear()
                return Answer(answer, repeated=attempts > 0)
            attempts += 1
            if left_s >= self._attempt_timeout_s or connection.endpoint not in heard:
                heard[connection.endpoint] = answer
            self.move_on(connection)
            self._check_handshakes(heard)
            await self._pause(attempts, ends_at)
        self._last_reasons |= heard
        raise refusals.unreachable(method, self._total_timeout_s, self._last_reasons)

    async def _attempt(
        self,
        attempt: Callable[[Connection, float], Awaitable[AnswerT]],
        connection: Connection,
        left_s: float,
    ) -> AnswerT | RefusalReason:
        """The answer, or the reason to ask another member."""
        await connection.refresh()
        try:
            return await attempt(connection, min(self._attempt_timeout_s, left_s))
        except Refused as refused:
            refused.by = connection.endpoint
            if refused.reason.kind not in ANOTHER_MAY_ANSWER:
                raise
            return refused.reason

    def _check_handshakes(self, heard: dict[Endpoint, RefusalReason]) -> None:
        failed = [reason for reason in heard.values() if reason.kind is Refusal.HANDSHAKE]
        if len(failed) == len(self._connections) and not self.answered:
            raise refusals.handshake_failed(heard)

    async def _pause(self, attempts: int, ends_at: float) -> None:
        """Pause after each round of all members, longer each time."""
        rounds, in_round = divmod(attempts, len(self._connections))
        if in_round == 0:
            left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**rounds, _LONGEST_PAUSE_S, left_s))
