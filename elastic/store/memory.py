"""A store in this process's memory, for one machine or for a coordinator that serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from elastic.store.interface import (
    Change,
    Entry,
    Guard,
    GuardFailed,
    LeaseExists,
    LeaseLost,
    Listing,
    WatchCompacted,
)

_MOST_CHANGES = 100  # by which a watch may lag
_MOST_BYTES = 1 << 20  # of the values in these changes


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    """See elastic.store.interface.Store. Leases run by `clock` seconds.

    Each call ends leases that have expired, and so does a timer, so that watchers see that without
    a call. `revision` is the store's revision before its first write. No call except a watch ever
    suspends, so several calls in a row are one transaction.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, revision: int = 0) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._history: list[Change] = []
        self._history_bytes = 0
        self._compacted = revision + 1
        self._revision = revision
        self._granted = 0
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def revision(self) -> int:
        return self._revision

    def has_lease(self, lease: int) -> bool:
        self._expire()
        return lease in self._leases

    async def get(self, key: str) -> Entry | None:
        self._expire()
        return self._entries.get(key)

    async def list(self, prefix: str) -> Listing:
        self._expire()
        found = (self._entries[k] for k in sorted(self._entries) if k.startswith(prefix))
        return Listing(tuple(found), self._revision)

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        self._expire()
        self._check(guard)
        return self._write(key, value, lease)

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        self._expire()
        return None if key in self._entries else self._write(key, value, lease)

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        self._expire()
        self._check(guard)
        return self._remove(key)

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        seen = after
        while True:
            changed = self._changed
            if seen + 1 < self._compacted:
                raise WatchCompacted(self._compacted)
            for change in self._since(seen):
                seen = change.revision
                if change.key.startswith(prefix):
                    yield change
            await changed.wait()

    async def grant(self, ttl_s: float, *, name: int = 0) -> int:
        """See Store.grant. `name` is the id to give the lease; 0: the store chooses one. Raises
        LeaseExists."""
        self._expire()
        if name in self._leases:
            raise LeaseExists(f"lease {name} already exists")
        lease = name or self._unused_name()
        self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
        self._set_timer()
        return lease

    async def renew(self, lease: int) -> None:
        self._expire()
        held = self._lease(lease)
        held.deadline = self._clock() + held.ttl_s

    async def revoke(self, lease: int) -> None:
        self._revoke(lease)

    def compact(self, revision: int) -> None:
        """Forget changes before `revision`, as etcd does from time to time."""
        self._history = [*self._since(revision - 1)]
        self._history_bytes = sum(map(_size, self._history))
        self._compacted = revision

    def _unused_name(self) -> int:
        self._granted += 1
        while self._granted in self._leases:
            self._granted += 1
        return self._granted

    def _since(self, revision: int) -> Sequence[Change]:
        """The changes after `revision`. Each change makes one revision, the last one the newest."""
        newer = self._revision - revision
        return self._history[-newer:] if newer > 0 else []

    def _revoke(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        for key in sorted(held.keys) if held else ():
            self._remove(key)

    def _expire(self) -> None:
        now = self._clock()
        for lease in [i for i, held in self._leases.items() if held.deadline <= now]:
            self._revoke(lease)

    def _set_timer(self) -> None:
        """Set the timer to the next end of a lease. If that was renewed meanwhile, set it again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._leases:
            next_end = min(held.deadline for held in self._leases.values())
            delay_s = max(0.0, next_end - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._expire()
        self._set_timer()

    def _check(self, guard: Guard | None) -> None:
        if guard is None:
            return
        entry = self._entries.get(guard.key)
        if not guard.holds(entry):
            raise GuardFailed(
                f"{guard.key} is no longer the key created at revision {guard.created}"
            )

    def _lease(self, lease: int) -> _Lease:
        try:
            return self._leases[lease]
        except KeyError:
            raise LeaseLost(f"lease {lease} has expired or was never granted") from None

    def _write(self, key: str, value: bytes, lease: int) -> Entry:
        before = self._entries.get(key)
        if lease:
            self._lease(lease).keys.add(key)
        if before is not None and before.lease and before.lease != lease:
            self._leases[before.lease].keys.discard(key)
        revision = self._revision + 1
        created = before.created if before is not None else revision
        entry = Entry(key=key, value=value, created=created, modified=revision, lease=lease)
        self._entries[key] = entry
        self._publish(Change(key=key, revision=revision, entry=entry))
        return entry

    def _remove(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)
        self._publish(Change(key=key, revision=self._revision + 1, entry=None))
        return True

    def _publish(self, change: Change) -> None:
        self._revision = change.revision
        self._history.append(change)
        self._history_bytes += _size(change)
        if len(self._history) > 2 * _MOST_CHANGES:
            self.compact(self._revision - _MOST_CHANGES + 1)
        while self._history_bytes > _MOST_BYTES and len(self._history) > 1:
            self.compact(self._revision - len(self._history) // 2 + 1)
        self._changed.set()
        self._changed = asyncio.Event()


def _size(change: Change) -> int:
    return len(change.entry.value) if change.entry is not None else 0
