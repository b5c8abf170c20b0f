"""Keeps account of the job's slots beside its machine: hands on events, reports, documents."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastic.coordinator.attendance import name_of
from elastic.core.accounting import TimeSpent
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.slot_accounts import Accounts, Report, SlotAccounts
from elastic.runtime.journal import Journal
from elastic.v1 import job_pb2 as pb

T = TypeVar("T")


class SlotTime:
    """The machine as the driver sees it: the accounts observe each of its events.

    What goes wrong in accounts is told once, and never holds up the job: they stay as they were.
    """

    def __init__(
        self,
        machine: Coordinator,
        journal: Journal,
        *,
        most: int,
        stored: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """most: slots that the job may have. stored: what a leader before has kept."""
        self._machine, self._journal, self._clock = machine, journal, clock
        self._accounts = self.slots = SlotAccounts(most, name_of=name_of)
        self.also: Callable[[ev.Event, Sequence[fx.Effect], Coordinator, float], None] = _nobody
        """Observes each event after the accounts; must not raise."""
        self._failed = False
        if stored:
            self._accounts.adopt(stored, clock(), _ahead_s(clock()))

    def handle(self, event: ev.Event, now: float) -> Sequence[fx.Effect]:
        """See Coordinator.handle."""
        effects = self._machine.handle(event, now)
        self._guarded(lambda: self._accounts.observe(event, effects, self._machine, now), None)
        self.also(event, effects, self._machine, now)
        return effects

    def spent(self, worker: str, spent: pb.TimeSpent) -> None:
        """A worker says what it has spent its time on."""
        numbers = [value for _, value in spent.ListFields()]
        if not spent.generation or not all(0.0 <= number < math.inf for number in numbers):
            return  # it was in no group, or is of another version
        report = Report(
            worker=worker,
            generation=spent.generation,
            committed=spent.committed,
            spent=TimeSpent(
                steps=spent.steps,
                steps_s=spent.steps_s,
                data_s=spent.data_s,
                calls_s=spent.calls_s,
                saves_s=spent.saves_s,
                own_s=spent.own_s,
                first_steps_s=spent.first_steps_s,
                given_up_s=spent.given_up_s,
                regroup_s=spent.regroup_s,
                join_s=spent.join_s,
                sync_s=spent.sync_s,
            ),
        )
        self._guarded(lambda: self._accounts.spent(report, self._clock()), None)

    def accounts(self) -> Accounts:
        """The books as they are."""
        now = self._clock()
        return self._guarded(lambda: self._accounts.accounts(now, _ahead_s(now)), Accounts())

    def to_document(self) -> Mapping[str, Any]:
        """As JSON values, for the leaders after."""
        now = self._clock()
        nothing: Mapping[str, Any] = {}
        return self._guarded(lambda: self._accounts.to_document(now, _ahead_s(now)), nothing)

    def _guarded(self, action: Callable[[], T], otherwise: T) -> T:
        if not self._failed:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - a job can do without
                self._failed = True
                message = f"no time is accounted for any more: {type(error).__name__}: {error}"
                self._journal.record("warning", source="accounts", message=message)
        return otherwise


def _nobody(*_: object) -> None:
    pass


def _ahead_s(now: float) -> float:
    return time.time() - now
