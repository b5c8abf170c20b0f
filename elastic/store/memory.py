"""The store in this process's memory: for one machine, where nothing else could outlive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from elastic.store.interface import Change, Entry, Guard, GuardFailed, LeaseLost


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    """See elastic.store.interface.Store. Leases are checked at each call, by `clock` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._history: list[Change] = []
        self._revision = 0
        self._granted = 0
        self._changed = asyncio.Condition()

    async def get(self, key: str) -> Entry | None:
        """The key's entry, or None."""
        await self._expire()
        return self._entries.get(key)

    async def list(self, prefix: str) -> list[Entry]:
        """Entries whose key starts with `prefix`, by key."""
        await self._expire()
        return [self._entries[k] for k in sorted(self._entries) if k.startswith(prefix)]

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        """Write; raises GuardFailed, or LeaseLost if `lease` is unknown."""
        await self._expire()
        self._check(guard)
        return await self._write(key, value, lease)

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        """Write if the key is absent; None if it is there."""
        await self._expire()
        return None if key in self._entries else await self._write(key, value, lease)

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        """Remove; True if it was there. Raises GuardFailed."""
        await self._expire()
        self._check(guard)
        return await self._remove(key)

    async def watch(self, prefix: str, *, after: int) -> AsyncIterator[Change]:
        """Every change of keys under `prefix` after revision `after`, in order, none twice."""
        seen = after
        while True:
            for change in self._history[seen:]:
                seen = change.revision
                if change.key.startswith(prefix):
                    yield change
            async with self._changed:
                await self._changed.wait_for(lambda: self._revision > seen)  # noqa: B023

    async def grant(self, ttl_s: float) -> int:
        """A lease that lives `ttl_s` seconds after it was last renewed."""
        self._granted += 1
        self._leases[self._granted] = _Lease(ttl_s, self._clock() + ttl_s)
        return self._granted

    async def renew(self, lease: int) -> None:
        """Start the lease's time anew; raises LeaseLost."""
        await self._expire()
        held = self._lease(lease)
        held.deadline = self._clock() + held.ttl_s

    async def revoke(self, lease: int) -> None:
        """End the lease and remove its keys; unknown leases are fine."""
        held = self._leases.pop(lease, None)
        for key in sorted(held.keys) if held else ():
            await self._remove(key)

    async def _expire(self) -> None:
        now = self._clock()
        for lease in [i for i, held in self._leases.items() if held.deadline <= now]:
            await self.revoke(lease)

    def _check(self, guard: Guard | None) -> None:
        if guard is None:
            return
        entry = self._entries.get(guard.key)
        if entry is None or entry.created != guard.created:
            raise GuardFailed(f"{guard.key} is not the one created at revision {guard.created}")

    def _lease(self, lease: int) -> _Lease:
        try:
            return self._leases[lease]
        except KeyError:
            raise LeaseLost(f"lease {lease} has expired or was never granted") from None

    async def _write(self, key: str, value: bytes, lease: int) -> Entry:
        before = self._entries.get(key)
        if lease:
            self._lease(lease).keys.add(key)
        if before is not None and before.lease and before.lease != lease:
            self._leases[before.lease].keys.discard(key)
        revision = self._revision + 1
        created = before.created if before is not None else revision
        entry = Entry(key=key, value=value, created=created, modified=revision, lease=lease)
        self._entries[key] = entry
        await self._publish(Change(key=key, revision=revision, entry=entry))
        return entry

    async def _remove(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)
        await self._publish(Change(key=key, revision=self._revision + 1, entry=None))
        return True

    async def _publish(self, change: Change) -> None:
        self._revision = change.revision
        self._history.append(change)
        async with self._changed:
            self._changed.notify_all()
