"""What agents report reaches a leader's book, and no error in the book reaches the job."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic.coordinator.leadership import Leadership
from elastic.coordinator.records import Records
from elastic.coordinator.watch import Watch
from elastic.core.book.accounting import Kind
from elastic.core.book.book import Book
from elastic.core.book.slot_accounts import SlotAccounts
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.membership import WorkerPhase
from elastic.runtime.journal import Entry, Journal
from elastic.store.interface import Guard
from elastic.v1 import job_pb2 as pb
from tests.unit.coordinator.agents import worker


class Leader:
    """The leader of a job with one worker; the test sets its clock."""

    def __init__(self, stored: Any = None, now: float = 100.0) -> None:
        self.now = now
        self.entries: list[Entry] = []
        self.machine = Coordinator(CoordinatorSettings(incarnation="x"), now=self.now)
        journal = Journal(self.entries.append)
        leadership = Leadership(
            job="job",
            guard=Guard(key="k", created=1),
            incarnation="x",
            records=Records(accounts=stored or {}),
        )
        self.watch = Watch(
            leadership,
            self.machine,
            journal,
            most=1,
            clock=lambda: self.now,
        )

    def hears(self, phase: WorkerPhase, generation: int = 0) -> None:
        statuses = (worker("w", phase, generation),)
        report = ev.NodeReported(node="n@0123", slots=1, workers=statuses)
        self.handles(report)

    def handles(self, event: ev.Event) -> None:
        self.watch.observe(event, self.machine.handle(event, self.now), self.now)

    def trains(self) -> None:
        self.hears(WorkerPhase.READY)
        self.handles(ev.GenerationPersisted(number=1))
        self.hears(WorkerPhase.TRAINING, 1)


def test_the_time_that_a_worker_reports_is_booked() -> None:
    leader = Leader()
    leader.trains()
    leader.now += 10.0
    leader.watch.spent("w", pb.TimeSpent(generation=1, steps=8, steps_s=9.0, data_s=2.0))
    found = leader.watch.accounts()
    assert found.settled[Kind.DATA_WAIT] == 2.0
    assert found.kinds[Kind.PRODUCTIVE] == 8.0
    assert dict(found.nodes["n"]) == {Kind.DATA_WAIT: 2.0}, "by its name"


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0])
def test_figures_that_make_no_sense_are_ignored(nonsense: float) -> None:
    leader = Leader()
    leader.trains()
    leader.now += 10.0
    leader.watch.spent("w", pb.TimeSpent(generation=1, steps=8, steps_s=nonsense, data_s=2.0))
    assert leader.watch.accounts().settled[Kind.DATA_WAIT] == 0.0


def test_the_next_leader_continues_the_accounts() -> None:
    first = Leader()
    first.trains()
    first.now += 10.0
    second = Leader(first.watch.accounts_to_store(), now=first.now)
    second.now += 2.0
    assert second.watch.accounts().wall_s == pytest.approx(12.0, abs=1.0)


def fail(*_: object) -> None:
    raise ZeroDivisionError("by zero")


def test_after_an_error_the_book_begins_again_with_what_was_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Leader()
    leader.trains()
    leader.now += 10.0
    leader.watch.accounts_to_store()
    with monkeypatch.context() as broken:
        broken.setattr(Book, "observe", fail)
        leader.handles(ev.TimerFired())
    leader.hears(WorkerPhase.TRAINING, 1)
    leader.now += 3.0
    assert leader.watch.accounts().wall_s == pytest.approx(13.0, abs=0.1)
    (warning,) = leader.entries
    assert warning.fields["message"] == (
        "the book of losses and time begins again with what was stored: ZeroDivisionError: by zero"
    )


def test_an_error_in_the_totals_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader()
    leader.trains()
    monkeypatch.setattr(leader.watch.totals, "progressed", fail)
    monkeypatch.setattr(leader.watch.totals, "reformed", fail)
    leader.watch.progressed(pb.Progress(worker="w", generation=1, committed=3), 1)
    leader.watch.reformed(pb.Reformed(worker="w", generation=1, committed=3), 0.0)
    assert leader.watch.progress.committed == 3
    assert [e.name for e in leader.entries] == ["warning", "progress", "warning"]


def test_a_book_that_fails_again_and_again_is_closed_and_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Leader()
    monkeypatch.setattr(Book, "observe", fail)
    leader.trains()
    leader.hears(WorkerPhase.TRAINING, 1)
    assert leader.watch.accounts().goodput is None
    assert leader.watch.accounts_to_store() == {}
    assert not leader.watch.unstored
    assert [e.name for e in leader.entries] == ["warning"] * 3
    assert "is closed" in leader.entries[-1].fields["message"]


def test_accounts_from_before_an_error_are_stored_for_the_next_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Leader()
    leader.trains()
    leader.now += 10.0
    before = leader.watch.accounts_to_store()
    assert before
    monkeypatch.setattr(SlotAccounts, "to_document", fail)
    leader.now += 10.0
    assert leader.watch.accounts_to_store() == before
    assert leader.watch.accounts_to_store() == before, "and later too"
