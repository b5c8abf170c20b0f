"""An announcement frees the script's thread, and takes it into the newest group."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase, WorkerStatus
from elastic.core.worker.machine import Worker
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import Group, StoreHost
from tests.unit.worker.together import GLOO, Seat, meet, run_together


class Place:
    """A membership that is ready for a group, and what it has reported."""

    def __init__(self, worker: str, host: StoreHost, *, hold_s: float = 60.0) -> None:
        self.worker, self.host = worker, host
        self.reports: list[WorkerStatus] = []
        self.membership = Membership(
            Worker(worker, pid=1),
            report=self.reports.append,
            committed=lambda: 7,
            join_timeout_s=5.0,
            hold_s=hold_s,
        )
        self.membership.attach()
        self.membership.assign(0)
        self.membership.prepare(host.endpoint)

    def enter(self) -> Group:
        return self.membership.enter(self.host, GLOO, lambda _group: 7)

    def phases(self) -> list[WorkerPhase]:
        return [report.phase for report in self.reports]


def test_the_way_through_a_group_alone() -> None:
    def go(seat: Seat) -> None:
        place = Place("w0", seat.host)
        threading.Timer(0.05, place.membership.announce, [seat.generation(1)]).start()
        group = place.enter()
        assert place.membership.group is group
        assert (group.rank, group.world_size) == (0, 1)
        assert not place.membership.must_leave()
        place.membership.announce(seat.generation(2, leave_after=8))
        assert not place.membership.must_leave()
        assert not group.aborted
        place.membership.announce(seat.generation(3))
        assert group.aborted
        assert place.membership.must_leave()
        place.membership.leave()
        assert place.membership.group is None
        assert place.enter().generation.number == 3
        place.membership.finish()
        waiting = [WorkerPhase.SPARE, WorkerPhase.PREPARING, WorkerPhase.READY]
        assert [p for p in place.phases() if p in waiting][:3] == waiting
        last = place.reports[-1]
        assert (last.phase, last.generation, last.committed) == (WorkerPhase.FINISHED, 3, 7)
        durations = place.membership.durations
        assert durations.join_s > 0.0
        assert durations.since_ready_s() < 1.0

    run_together(go)


@pytest.mark.parametrize(("settled", "leaves"), [({}, True), ({"leave_after": 9}, False)])
def test_a_planned_change_is_awaited_at_its_boundary(settled: dict[str, int], leaves: bool) -> None:
    def go(seat: Seat) -> None:
        place = Place("w0", seat.host)
        place.membership.announce(seat.generation(1))
        group = place.enter()
        assert not place.membership.leaves_here()
        planned = seat.generation(2, leave_after=7)
        place.membership.announce(replace(planned, provisional=True))
        assert not place.membership.must_leave()
        threading.Timer(0.1, place.membership.announce, [replace(planned, **settled)]).start()
        began = time.monotonic()
        assert place.membership.leaves_here() is leaves
        assert time.monotonic() - began >= 0.1
        assert not group.aborted

    run_together(go)


def test_nothing_is_awaited_when_the_change_is_at_once_or_the_answer_never_comes() -> None:
    def go(seat: Seat) -> None:
        provisional = replace(seat.generation(2, leave_after=7), provisional=True)
        patient, impatient = Place("w0", seat.host), Place("w0", seat.host, hold_s=0.2)
        for place in (patient, impatient):
            place.membership.announce(seat.generation(1))
            place.enter()
            place.membership.announce(provisional)
            if place is patient:
                threading.Timer(0.1, place.membership.announce, [seat.generation(3)]).start()
            assert place.membership.leaves_here()
            place.membership.leave()
        assert impatient.enter().generation == provisional

    run_together(go)


def test_a_blocked_collective_is_freed_by_an_announcement() -> None:
    def block(seat: Seat) -> None:
        place = Place("w0", seat.host)
        place.membership.announce(seat.generation(1))
        place.enter()
        threading.Timer(0.1, place.membership.announce, [seat.generation(2)]).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            meet()
        assert time.monotonic() - began < 1.0
        place.membership.lost(caught.value)
        left = place.reports[-1]
        assert (left.phase, left.generation, left.broken) == (WorkerPhase.READY, 1, False)
        seat.exchange("freed")
        assert place.enter().generation.number == 2
        meet()

    def stay_away(seat: Seat) -> None:
        place = Place("w1", seat.host)
        place.membership.announce(seat.generation(1))
        place.enter()
        seat.exchange("freed")
        place.membership.announce(seat.generation(2))
        place.membership.leave()
        place.enter()
        meet()

    run_together(block, stay_away)


def test_a_group_that_breaks_by_itself_is_reported_broken() -> None:
    def break_it(seat: Seat) -> None:
        place = Place("w0", seat.host)
        place.membership.announce(seat.generation(1))
        place.enter()
        seat.exchange("in")
        place.membership.abandon()
        seat.exchange("broken")

    def notice(seat: Seat) -> None:
        place = Place("w1", seat.host)
        place.membership.announce(seat.generation(1))
        place.enter()
        seat.exchange("in")
        seat.exchange("broken")
        with pytest.raises(RuntimeError) as caught:
            meet()
        place.membership.lost(caught.value)
        report = place.reports[-1]
        assert (report.phase, report.generation, report.broken) == (WorkerPhase.READY, 1, True)
        assert "gloo" in report.detail

    run_together(break_it, notice)


def test_building_a_group_is_given_up_for_a_newer_one() -> None:
    """Nobody else comes to generation 1; generation 2 does without them."""

    def go(seat: Seat) -> None:
        place = Place("w0", seat.host)
        alone = seat.generation(2)
        absent = Member(worker="w1", node="n", slot=0, endpoint="127.0.0.1:1")
        with_another = Generation(
            number=1,
            incarnation="i",
            members=(*alone.members, absent),
            reason=ChangeReason.STARTED,
        )
        place.membership.announce(with_another)
        threading.Timer(0.1, place.membership.announce, [alone]).start()
        began = time.monotonic()
        group = place.enter()
        assert group.generation.number == 2
        assert time.monotonic() - began < 2.0

    run_together(go)


def test_a_loss_while_coming_to_one_state_leads_to_the_next_group() -> None:
    def go(seat: Seat) -> None:
        place = Place("w0", seat.host)
        place.membership.announce(seat.generation(1))
        seen = []

        def synchronise(group: Group) -> int:
            seen.append(group.generation.number)
            if group.generation.number == 1:
                place.membership.announce(seat.generation(2))
            return 7

        place.membership.enter(seat.host, GLOO, synchronise)
        assert seen == [1, 2]

    run_together(go)


def test_an_error_of_the_script_while_coming_to_one_state_is_its_own() -> None:
    def go(seat: Seat) -> None:
        place = Place("w0", seat.host)
        place.membership.announce(seat.generation(1))

        def synchronise(group: Group) -> int:
            del group
            torch.zeros(2) @ torch.zeros(3)
            return 0

        with pytest.raises(RuntimeError, match="inconsistent tensor size"):
            place.membership.enter(seat.host, GLOO, synchronise)

    run_together(go)
