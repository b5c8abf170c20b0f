"""The store in an etcd cluster of 3.5.23, 3.6.5 or newer; older ones may lose writes and leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import AsyncIterator, Sequence

import grpc

from elastic.errors import TransientError
from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.client import EtcdClient, WatchStream
from elastic.store.etcd.connection import LEASE_GRANT, LEASE_REVOKE, RANGE, TXN, Answer, Connection
from elastic.store.etcd.endpoints import EtcdOptions
from elastic.store.etcd.keys import Keys, Outcome
from elastic.store.etcd.refusals import NO_ANSWER, Refused, reason_of_status
from elastic.store.interface import (
    Change,
    Entry,
    Guard,
    GuardFailed,
    LeaseExists,
    LeaseLost,
    Listing,
    StoreWentBack,
    WatchCompacted,
)


class EtcdStore:
    """See elastic.store.interface.Store.

    Every call ends within the options' `total_timeout_s`. TransientError names each member asked
    and what it said. ConfigurationError is raised only until the cluster has answered once, so that
    no later change by its operators ends a running job. Belongs to one event loop; close it.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._keys = Keys(options.namespace)
        self._client = EtcdClient(options)

    async def __aenter__(self) -> EtcdStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; cancels calls and watches that still wait."""
        await self._client.close()

    async def get(self, key: str) -> Entry | None:
        return await self._get(key, self._client.ends_at())

    async def list(self, prefix: str) -> Listing:
        start, end = self._keys.below(prefix)
        answer = await self._client.call(RANGE, pb.RangeRequest(key=start, range_end=end))
        entries = tuple(self._keys.entry(kv) for kv in answer.value.kvs)
        return Listing(entries, answer.value.header.revision)

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        write = self._keys.put(key, value, lease)
        ends_at = self._client.ends_at()
        before = await self._get(key, ends_at)
        while True:
            answer = await self._write(key, before, guard, [write], ends_at)
            now = answer.value.entry
            ours = answer.repeated and _changed(before, now) and _holds(now, value, lease)
            if now is not None and (answer.value.done or ours):
                return now
            _check_guard(guard, answer.value)
            before = now

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        write = self._keys.put(key, value, lease)
        answer = await self._write(key, None, None, [write], self._client.ends_at())
        now = answer.value.entry
        ours = answer.repeated and _holds(now, value, lease)
        return now if answer.value.done or ours else None

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        ends_at = self._client.ends_at()
        before = await self._get(key, ends_at)
        while True:
            writes = [] if before is None else [self._keys.delete(key)]
            answer = await self._write(key, before, guard, writes, ends_at)
            now = answer.value.entry
            if answer.value.done or (answer.repeated and before is not None and now is None):
                return before is not None
            _check_guard(guard, answer.value)
            before = now

    def watch(self, prefix: str, *, after: int) -> AsyncIterator[Change]:
        return watch(self._client, self._keys, self._options, prefix, after)

    async def grant(self, ttl_s: float) -> int:
        # The client names the lease, so that a repeated request grants only one.
        lease = secrets.randbits(62) + 1
        with contextlib.suppress(LeaseExists):
            await self._client.call(
                LEASE_GRANT, pb.LeaseGrantRequest(id=lease, ttl=math.ceil(ttl_s))
            )
        return lease

    async def renew(self, lease: int) -> None:
        await self._client.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        with contextlib.suppress(LeaseLost):
            await self._client.call(LEASE_REVOKE, pb.LeaseRevokeRequest(id=lease))

    async def _get(self, key: str, ends_at: float) -> Entry | None:
        request = pb.RangeRequest(key=self._keys.encode(key))
        answer = await self._client.call(RANGE, request, ends_at=ends_at)
        return self._keys.entry(answer.value.kvs[0]) if answer.value.kvs else None

    async def _write(
        self,
        key: str,
        before: Entry | None,
        guard: Guard | None,
        writes: Sequence[pb.RequestOp],
        ends_at: float,
    ) -> Answer[Outcome]:
        """Write if the key is unchanged since `before`."""
        expected = 0 if before is None else before.modified
        request = self._keys.request(key, expected=expected, guard=guard, writes=writes)
        answer = await self._client.call(TXN, request, ends_at=ends_at)
        outcome = self._keys.outcome(guard, answer.value)
        return Answer(outcome, repeated=answer.repeated)


def _holds(entry: Entry | None, value: bytes, lease: int) -> bool:
    return entry is not None and (entry.value, entry.lease) == (value, lease)


def _changed(before: Entry | None, now: Entry | None) -> bool:
    return now is not None and (before is None or now.modified > before.modified)


def _check_guard(guard: Guard | None, outcome: Outcome) -> None:
    if guard is not None and not outcome.guarded:
        raise GuardFailed(f"{guard.key} is no longer the key created at revision {guard.created}")


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
                    # Not the header's revision: while catching up, that is far ahead of the events.
                    after = event.kv.mod_revision
                    pause_s = _FIRST_PAUSE_S
                    yield keys.change(event)
        except Refused as broken:
            _LOG.info("watch of %r at %s: %s", prefix, connection.endpoint, broken)
            client.watch_failed(connection, token, broken.reason)
        finally:
            await stream.close()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _open(
    client: EtcdClient, key: bytes, after: int
) -> tuple[Connection, str | None, WatchStream]:
    """Open a stream from a member that answers a read, and so has a quorum."""
    while True:
        try:
            answer = await client.call(RANGE, pb.RangeRequest(key=key))
            if answer.value.header.revision < after:
                raise StoreWentBack(
                    f"etcd was at revision {after} and is now at {answer.value.header.revision}"
                )
            return await client.watch_stream()
        except StoreWentBack:
            raise
        except TransientError as error:
            _LOG.warning("watch interrupted; trying again: %s", error)
        await asyncio.sleep(_LONGEST_PAUSE_S)


class _Listener:
    """The stream of a watch from one member. Raises Refused when it ends or falls silent."""

    def __init__(self, stream: WatchStream, options: EtcdOptions) -> None:
        self._stream = stream
        self._answers_within_s = options.attempt_timeout_s
        self._idle_s = options.watch_idle_s

    async def start(self, start: bytes, end: bytes, revision: int) -> None:
        """Ask for the changes of these keys at `revision` or later."""
        create = pb.WatchCreateRequest(key=start, range_end=end, start_revision=revision)
        await self._send(pb.WatchRequest(create_request=create))
        response = await self._stream.receive(timeout_s=self._answers_within_s)
        if response is None:
            raise Refused(NO_ANSWER)
        _check(response)

    async def events(self) -> Sequence[pb.Event]:
        """The next events: all of one revision, or of several."""
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
        raise Refused(reason_of_status(grpc.StatusCode.UNKNOWN, response.cancel_reason))
