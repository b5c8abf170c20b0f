"""Keeps a lease alive, and says when it may be lost and when it is lost."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable

from elastic.errors import TransientError
from elastic.store.interface import LeaseLost, Store

_RENEWALS_PER_TTL = 3
_LOOKS_PER_TTL = 20
_PAUSE_AFTER_FAILURE_S = 0.1


class LeaseState(enum.Enum):
    """How certain the holder is of its lease."""

    HELD = enum.auto()
    SUSPECT = enum.auto()
    """Not renewed in time: others may see it as gone. It may become HELD again."""
    GONE = enum.auto()
    """The store does not know it any more: register again with a new lease."""


def boot_time_s() -> float:
    """Seconds since the machine started, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseKeeper:
    """Holds one lease at a time: `grant` it, attach keys, `keep` it until it is gone, begin again.

    `keep` calls `on_change` at each change of state. A lease is HELD until `ttl_s` after the last
    answered request was *sent*, by this machine's own clock; the store never ends it earlier.
    Before acting on a lease ask `held`: it looks at the clock.
    """

    def __init__(
        self,
        store: Store,
        *,
        ttl_s: float,
        on_change: Callable[[LeaseState], None],
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._clock = clock
        self._state = LeaseState.GONE
        self._lease = 0
        self._sent_at = 0.0

    @property
    def lease(self) -> int:
        """The lease granted last, or 0."""
        return self._lease

    @property
    def renewed_at_s(self) -> float:
        """When the last answered request was sent, by the keeper's clock."""
        return self._sent_at

    def held(self) -> bool:
        """Whether the lease is certainly alive at this moment."""
        return self._state is LeaseState.HELD and not self._is_late()

    async def grant(self) -> int:
        """Take a new lease; raises TransientError. Then call `keep`."""
        sent_at = self._clock()
        self._lease = await self._store.grant(self._ttl_s)
        self._sent_at = sent_at
        self._state = LeaseState.HELD
        return self._lease

    async def keep(self) -> None:
        """Renew the lease every third of its time; return when it is GONE.

        Raises ConfigurationError if the store does.
        """
        while self._state is not LeaseState.GONE:
            await self._look_until(self._is_renewal_due)
            renewing = asyncio.ensure_future(self._renew())
            try:
                await self._look_until(renewing.done)
            finally:
                renewing.cancel()
            if renewing.done():
                renewing.result()

    async def revoke(self) -> None:
        """End the lease and remove its keys; `keep` returns. Does not call `on_change`."""
        self._state = LeaseState.GONE
        await self._store.revoke(self._lease)

    async def _renew(self) -> None:
        sent_at = self._clock()
        try:
            await self._store.renew(self._lease)
        except LeaseLost:
            self._enter(LeaseState.GONE)
        except TransientError:
            await asyncio.sleep(min(_PAUSE_AFTER_FAILURE_S, self._ttl_s / _LOOKS_PER_TTL))
        else:
            self._sent_at = sent_at
            self._enter(LeaseState.SUSPECT if self._is_late() else LeaseState.HELD)

    async def _look_until(self, over: Callable[[], bool]) -> None:
        """Look at the clock while waiting: the event loop's timers do not count suspension."""
        while not over() and self._state is not LeaseState.GONE:
            if self._is_late():
                self._enter(LeaseState.SUSPECT)
            await asyncio.sleep(self._ttl_s / _LOOKS_PER_TTL)

    def _is_late(self) -> bool:
        return self._clock() >= self._sent_at + self._ttl_s

    def _is_renewal_due(self) -> bool:
        return self._clock() >= self._sent_at + self._ttl_s / _RENEWALS_PER_TTL

    def _enter(self, state: LeaseState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change(state)
