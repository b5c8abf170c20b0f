"""Every change once and in order, whichever members tell of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import grpc

from elastic.errors import TransientError
from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.client import EtcdClient, WatchStream
from elastic.store.etcd.connection import Connection
from elastic.store.etcd.keys import Keys
from elastic.store.etcd.methods import RANGE
from elastic.store.etcd.options import EtcdOptions
from elastic.store.etcd.refusals import NO_ANSWER, Refused, status_said
from elastic.store.interface import Change, StoreWentBack, WatchCompacted

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


async def watch(
    client: EtcdClient, keys: Keys, options: EtcdOptions, prefix: str, after: int
) -> AsyncIterator[Change]:
    """See Store.watch."""
    start, end = keys.below(prefix)
    pause_s = _FIRST_PAUSE_S
    while True:
        connection, token, stream = await _open(client, start, after)
        listener = _Listener(stream, options)
        try:
            await listener.start(start, end, after + 1)
            while True:
                for event in await listener.events():
                    # Not the header's revision: when catching up, that is far ahead of the events.
                    after = event.kv.mod_revision
                    pause_s = _FIRST_PAUSE_S
                    yield keys.change(event)
        except Refused as broken:
            _LOG.info("watch of %r at %s: %s", prefix, connection.endpoint, broken)
            client.watch_failed(connection, token, broken.said)
        finally:
            await stream.close()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _open(
    client: EtcdClient, key: bytes, after: int
) -> tuple[Connection, str | None, WatchStream]:
    """A stream from a member that answers a read, for which a quorum is needed as well."""
    while True:
        try:
            answer = await client.call(RANGE, pb.RangeRequest(key=key))
            if answer.value.header.revision < after:
                raise StoreWentBack(
                    f"etcd was at revision {after} and is at {answer.value.header.revision}"
                )
            return await client.watch_stream()
        except StoreWentBack:
            raise
        except TransientError as error:
            _LOG.warning("watching nothing for now: %s", error)
        await asyncio.sleep(_LONGEST_PAUSE_S)


class _Listener:
    """One stream, from one member. Raises Refused when it ends or falls silent."""

    def __init__(self, stream: WatchStream, options: EtcdOptions) -> None:
        self._stream = stream
        self._answers_within_s = options.attempt_timeout_s
        self._idle_s = options.watch_idle_s

    async def start(self, start: bytes, end: bytes, revision: int) -> None:
        """Ask for what happened to these keys at `revision` or later."""
        create = pb.WatchCreateRequest(key=start, range_end=end, start_revision=revision)
        await self._send(pb.WatchRequest(create_request=create))
        response = await self._stream.receive(timeout_s=self._answers_within_s)
        if response is None:
            raise Refused(NO_ANSWER)
        _check(response)

    async def events(self) -> Sequence[pb.Event]:
        """The next ones: all those of one revision, or of several."""
        while True:
            response = await self._stream.receive(timeout_s=self._idle_s)
            if response is None:
                await self._send(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
                response = await self._stream.receive(timeout_s=self._answers_within_s)
            if response is None:
                raise Refused(NO_ANSWER)
            _check(response)
            if response.events:
                return response.events

    async def _send(self, request: pb.WatchRequest) -> None:
        await self._stream.send(request, timeout_s=self._answers_within_s)


def _check(response: pb.WatchResponse) -> None:
    if response.compact_revision:
        raise WatchCompacted(response.compact_revision)
    if response.canceled:
        raise Refused(status_said(grpc.StatusCode.UNKNOWN, response.cancel_reason))
