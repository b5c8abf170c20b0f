"""Holds a key under its own lease: takes it, keeps it, watches it and gives it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from elastic.errors import TransientError
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Guard, GuardFailed, LeaseLost, Store
from elastic.store.lease_keeper import LeaseKeeper, LeaseState, boot_time_s
from elastic.store.retries import retry, within

_LOG = logging.getLogger(__name__)
_PAUSE_AFTER_FAILURE_S = 0.1
_FAREWELL_S = 2.0
"""Seconds for giving the key back, which is only a courtesy: the lease ends by itself."""


class Claim:
    """`take` the key, `hold` it until it is lost, and begin again; `release` it at any time. An
    election candidate and a node's registration are claims.

    `on_change` gets the changes of a claim that was taken: SUSPECT while its lease may be lost,
    HELD when the lease was not lost after all, and GONE once, when the key is no longer ours. The
    value must differ from that of every competitor.
    """

    def __init__(
        self,
        store: Store,
        *,
        key: str,
        ttl_s: float,
        on_change: Callable[[LeaseState], None],
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        self._store = store
        self._key = key
        self._on_change = on_change
        self._keeper = LeaseKeeper(store, ttl_s=ttl_s, on_change=self._lease_changed, clock=clock)
        self._keeping: asyncio.Task[None] | None = None
        self._entry: Entry | None = None
        self._releases = 0

    @property
    def entry(self) -> Entry | None:
        """The key's entry as we wrote it; None before that, and after the key is lost."""
        return self._entry

    @property
    def renewed_at_s(self) -> float:
        """When the last answered renewal was sent, by `clock`."""
        return self._keeper.renewed_at_s

    def held(self) -> bool:
        """Whether the key is certainly ours at this moment."""
        return self._entry is not None and self._keeper.held()

    async def take(self, value: bytes, *, over: Entry | None = None) -> Entry | None:
        """Write the key if it is absent, or if it is still the one that was created as `over`.

        Returns None if somebody else has the key, if the lease was lost meanwhile, or after a
        `release`. Waits through outages; raises ConfigurationError if the store does. The lease of
        the returned entry may be in doubt already: ask `held`.
        """
        releases = self._releases
        lease = await retry(self._keeper.grant, f"lease for {self._key!r}")
        self._keeping = asyncio.create_task(self._keeper.keep(), name=f"keep {self._key}")
        try:
            if releases == self._releases:
                entry = await self._write(value, lease, over)
                self._entry = entry if releases == self._releases else None
        finally:
            if self._entry is None:
                await self._revoke_lease()
        return self._entry

    async def hold(self) -> None:
        """Return when the key is no longer ours. Raises ConfigurationError if the store does."""
        entry, keeping = self._entry, self._keeping
        if entry is None or keeping is None:
            return
        watching = asyncio.create_task(self._until_taken_from(entry), name=f"watch {self._key}")
        try:
            await asyncio.wait({keeping, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if self._entry is entry:
            self._lost()
            await self._revoke_lease()
        for task in (keeping, watching):
            if not task.cancelled() and task.done() and (error := task.exception()) is not None:
                raise error

    async def release(self, *, last_words: bytes | None = None) -> None:
        """Give the key back at once, if the store answers; does not call `on_change`.

        Watchers see `last_words` as the key's value before the key goes away.
        """
        self._releases += 1
        entry, self._entry = self._entry, None
        if entry is not None and last_words is not None:
            guard = Guard.of(entry)
            put = self._store.put(entry.key, last_words, guard=guard, lease=entry.lease)
            await self._politely(put)
        await self._revoke_lease()

    async def _write(self, value: bytes, lease: int, over: Entry | None) -> Entry | None:
        while True:
            try:
                if over is not None:
                    guard = Guard.of(over)
                    return await self._store.put(self._key, value, guard=guard, lease=lease)
                entry = await self._store.create(self._key, value, lease=lease)
                entry = entry or await self._store.get(self._key)
            except (GuardFailed, LeaseLost):
                return None
            except TransientError as error:
                _LOG.warning("take %r: trying again: %s", self._key, error)
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                continue
            if entry is not None:
                return entry if (entry.value, entry.lease) == (value, lease) else None

    async def _until_taken_from(self, ours: Entry) -> None:
        async with aclosing(follow_key(self._store, self._key)) as entries:
            async for entry in entries:
                if entry is None or (entry.created, entry.lease) != (ours.created, ours.lease):
                    return

    def _lease_changed(self, state: LeaseState) -> None:
        if self._entry is None:
            return
        if state is LeaseState.GONE:
            self._lost()
        else:
            self._on_change(state)

    def _lost(self) -> None:
        self._entry = None
        self._on_change(LeaseState.GONE)

    async def _revoke_lease(self) -> None:
        """Revoke the lease. A write that may still happen then fails, since it needs the lease."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._politely(self._keeper.revoke())

    async def _politely(self, farewell: Awaitable[object]) -> None:
        try:
            await within(farewell, _FAREWELL_S)
        except (TransientError, asyncio.TimeoutError) as error:
            _LOG.info("could not release %r, which ends with its lease: %s", self._key, error)
