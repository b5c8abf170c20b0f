"""What agents report reaches a coordinator's accounts, and no error in them reaches the job."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic.coordinator.totals import SlotTime
from elastic.core.accounting import Kind
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.slot_accounts import SlotAccounts
from elastic.core.membership import WorkerPhase
from elastic.runtime.journal import Entry, Journal
from elastic.v1 import job_pb2 as pb
from tests.unit.coordinator.agents import worker


class Leader:
    """The leader of a job with one worker; the test sets its clock."""

    def __init__(self, stored: Any = None, now: float = 100.0) -> None:
        self.now = now
        self.entries: list[Entry] = []
        self.machine = Coordinator(CoordinatorSettings(incarnation="x"), now=self.now)
        journal = Journal(self.entries.append)
        self.time = SlotTime(
            self.machine, journal, most=1, stored=stored or {}, clock=lambda: self.now
        )

    def hears(self, phase: WorkerPhase, generation: int = 0) -> None:
        statuses = (worker("w", phase, generation),)
        report = ev.NodeReported(node="n@0123", slots=1, workers=statuses)
        self.handles(report)

    def handles(self, event: ev.Event) -> None:
        self.time.observe(event, self.machine.handle(event, self.now), self.now)

    def trains(self) -> None:
        self.hears(WorkerPhase.READY)
        self.handles(ev.GenerationPersisted(number=1))
        self.hears(WorkerPhase.TRAINING, 1)


def test_the_time_that_a_worker_reports_is_booked() -> None:
    leader = Leader()
    leader.trains()
    leader.now += 10.0
    leader.time.spent("w", pb.TimeSpent(generation=1, steps=8, steps_s=9.0, data_s=2.0))
    found = leader.time.accounts()
    assert found.settled[Kind.DATA_WAIT] == 2.0
    assert found.kinds[Kind.PRODUCTIVE] == 8.0
    assert dict(found.nodes["n"]) == {Kind.DATA_WAIT: 2.0}, "by its name"


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0])
def test_figures_that_make_no_sense_are_ignored(nonsense: float) -> None:
    leader = Leader()
    leader.trains()
    leader.now += 10.0
    leader.time.spent("w", pb.TimeSpent(generation=1, steps=8, steps_s=nonsense, data_s=2.0))
    assert leader.time.accounts().settled[Kind.DATA_WAIT] == 0.0


def test_the_next_leader_continues_the_accounts() -> None:
    first = Leader()
    first.trains()
    first.now += 10.0
    second = Leader(first.time.to_document(), now=first.now)
    second.now += 2.0
    assert second.time.accounts().wall_s == pytest.approx(12.0, abs=1.0)


def test_an_error_in_the_accounts_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    leader = Leader()
    monkeypatch.setattr(SlotAccounts, "observe", fail)
    leader.trains()
    assert leader.time.accounts().goodput is None
    assert leader.time.to_document() == {}
    (warning,) = leader.entries
    assert "ZeroDivisionError: by zero" in warning.fields["message"]


def test_accounts_from_before_an_error_are_stored_for_the_next_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    leader = Leader()
    leader.trains()
    leader.now += 10.0
    before = leader.time.to_document()
    assert before
    monkeypatch.setattr(SlotAccounts, "to_document", fail)
    leader.now += 10.0
    assert leader.time.to_document() == before
    assert leader.time.to_document() == before, "and later too"
