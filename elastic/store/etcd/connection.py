"""The channel to one member, and streams on it."""

from __future__ import annotations

import asyncio
from typing import Any, Generic

import grpc
import grpc.aio

from elastic.errors import ConfigurationError
from elastic.settings.tls_files import TlsFiles
from elastic.store.etcd.endpoints import Endpoint
from elastic.store.etcd.methods import Method, RequestT, ResponseT
from elastic.store.etcd.refusals import Refusal, Refused, Said, status_said
from elastic.store.etcd.tls import Fingerprint, credentials, fingerprint

Metadata = tuple[tuple[str, str], ...]

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.keepalive_time_ms", 10_000),  # etcd cuts off who pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # keepalive_timeout_ms alone is ignored by grpc core
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # how long a connection may take to open
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # certificates read anew mean a new connection
    ("grpc.enable_http_proxy", 0),  # https_proxy is for the world outside
]


class Channel:
    """A channel in use by several calls; one that was left is closed after the last of them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel
        self._users = 0
        self._left = False

    def enter(self) -> None:
        """A call begins."""
        self._users += 1

    async def exit(self) -> None:
        """A call has ended."""
        self._users -= 1
        await self._close_if_unused()

    async def leave(self) -> None:
        """No other call will begin."""
        self._left = True
        await self._close_if_unused()

    async def _close_if_unused(self) -> None:
        if self._left and self._users == 0:
            await self.grpc.close()


class Connection:
    """To one member; opened at the first call, opened anew after a failure if files changed."""

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
        """One request, one answer; raises Refused."""
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
            said = status_said(error.code(), error.details())
        else:
            return answer
        finally:
            await channel.exit()
        raise Refused(said)

    def stream(
        self,
        method: Method[RequestT, ResponseT],
        *,
        metadata: Metadata,
        timeout_s: float | None = None,
    ) -> Stream[RequestT, ResponseT]:
        """Many of both; close it."""
        channel = self._open()
        call = channel.grpc.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return Stream(channel, call(metadata=metadata, timeout=timeout_s))

    def failed(self) -> None:
        """The member did not answer."""
        self._failed = True

    async def refresh(self) -> None:
        """After a failure, leave the channel for a new one if certificates were replaced."""
        failed, self._failed = self._failed, False
        if not failed or self._files is None:
            return
        try:
            if self._fingerprint == await asyncio.to_thread(fingerprint, self._files):
                return
            await asyncio.to_thread(credentials, self._files)
        except (ConfigurationError, RuntimeError):
            return  # half replaced, or no thread is left to look: after the next failure then
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.leave()

    async def close(self) -> None:
        """Cancel what is going on."""
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
    """A bidirectional call. A read that was given up for now is taken up by the next one."""

    def __init__(self, channel: Channel, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        channel.enter()
        self._channel = channel
        self._call = call
        self._reading: asyncio.Future[ResponseT] | None = None

    async def send(self, request: RequestT, *, timeout_s: float) -> None:
        """Raises Refused."""
        # Not with wait_for: before Python 3.12 it may swallow a cancellation.
        writing = asyncio.ensure_future(self._call.write(request))
        writing.add_done_callback(_look_at)
        try:
            done, _ = await asyncio.wait({writing}, timeout=timeout_s)
        finally:
            writing.cancel()
        if not done:
            raise Refused(Said(Refusal.UNREACHABLE, "it takes no requests"))
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
        """Cancel the call."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
        await self._channel.exit()

    async def _ended(self) -> Said:
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return Said(Refusal.UNREACHABLE, "it ended the stream")
        return status_said(code, await self._call.details())


def _look_at(reading: asyncio.Future[Any]) -> None:
    """Nobody may be interested in how it ended."""
    if not reading.cancelled():
        reading.exception()
