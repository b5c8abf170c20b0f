"""Keeps the node's lease to train, and notices when the node was cut off for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic.runtime.training_lease import TrainingLease
from elastic.store.lease_keeper import boot_time_s

LOOK_S = 0.25
_SHORTEST_PULSE_S, _PULSES = 0.5, 20


class Isolation:
    """Renews the lease after each answer of the store or a coordinator; ends it when it lapsed.

    timeout_s: seconds for which the workers may train after the sending of the last request that
    was answered. 0: for ever, beside which no other group is formed. answered_at: when that request
    was sent, by `boot_time_s`. ask: sends a request to the coordinator, with the time. cut_off: is
    called once the lease is over, with the seconds since that last request.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        answered_at: Callable[[], float],
        ask: Callable[[float], None],
        cut_off: Callable[[float], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._answered_at = answered_at
        self._ask = ask
        self._cut_off = cut_off
        self._asks_after_s = max(_SHORTEST_PULSE_S, timeout_s / _PULSES)
        self._asked_at = 0.0
        self.lease = TrainingLease.new() if timeout_s else TrainingLease.unlimited()

    def adopt(self, lease: TrainingLease | None) -> None:
        """Go on with the lease of an earlier agent, whose workers live. None: its processes are
        those of a version without leases; their time counts from now on."""
        if lease is not None:
            self.lease = lease
        else:
            self.lease.grant(boot_time_s() + self._timeout_s)
        self.look()

    def look(self) -> None:
        """Judge by the lease as it stands, and only then renew it: an answer that comes after a
        pause of this process does not show that nobody took the node for gone meanwhile."""
        if not self._timeout_s:
            return
        now, lease = boot_time_s(), self.lease
        before = lease.valid_until
        if before is not None and lease.is_over(now):
            lease.begin_epoch()
            self._cut_off(now - (before - self._timeout_s))
            before = None
        until = self._answered_at() + self._timeout_s
        if until > max(now, before or 0.0):
            lease.grant(until)

    async def run(self) -> None:
        """Look at the lease, and ask the coordinator if the store has not answered lately."""
        while self._timeout_s:
            self.look()
            now = boot_time_s()
            if now >= max(self._answered_at(), self._asked_at) + self._asks_after_s:
                self._asked_at = now
                self._ask(now)
            await asyncio.sleep(LOOK_S)
