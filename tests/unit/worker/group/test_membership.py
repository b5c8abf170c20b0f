"""An announcement frees the script's thread and brings it into the newest group."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from elastic.core.membership import ChangeReason, Generation, Member, WorkerPhase, WorkerStatus
from elastic.core.worker.machine import Worker
from elastic.errors import GroupLost
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import Backend, Group, StoreHost
from tests import nccl_manners
from tests.unit.worker.together import GLOO, Seat, in_processes, meet, run_together


class Place:
    """A membership that is ready for a group, and what it has reported."""

    def __init__(self, worker: str, host: StoreHost, backend: Backend = GLOO) -> None:
        self.worker, self.host, self.backend = worker, host, backend
        self.reports: list[WorkerStatus] = []
        self.membership = Membership(
            Worker(worker, pid=1),
            report=self.reports.append,
            committed=lambda: 7,
            join_timeout_s=30.0,
        )
        self.membership.attach()
        self.membership.assign(0)
        self.membership.prepare(host.endpoint, backend)

    def enter(self) -> Group:
        group = self.membership.join(self.host, self.backend)
        self.membership.joined(7)
        return group

    def phases(self) -> list[WorkerPhase]:
        return [report.phase for report in self.reports]


def entered(seat: Seat, worker: str = "w0", backend: Backend = GLOO) -> Place:
    """Return a membership that has entered the first group."""
    place = Place(worker, seat.host, backend)
    place.membership.announce(seat.generation(1))
    place.enter()
    return place


@in_processes(1)
def test_a_single_member_joins_leaves_joins_again_and_finishes(seat: Seat) -> None:
    place = Place("w0", seat.host)
    threading.Timer(0.05, place.membership.announce, [seat.generation(1)]).start()
    group = place.enter()
    assert place.membership.group is group
    assert (group.rank, group.world_size) == (0, 1)
    assert not place.membership.must_leave()
    place.membership.announce(seat.generation(2, leave_after=8))
    assert not place.membership.must_leave()
    assert not group.lost
    place.membership.announce(seat.generation(3))
    assert group.lost
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


@pytest.mark.parametrize("settled", [{}, {"leave_after": 9}], ids=["confirmed", "moved on"])
@in_processes(1)
def test_members_wait_for_a_planned_change_to_settle(seat: Seat, settled: dict[str, int]) -> None:
    place = Place("w0", seat.host)
    place.membership.announce(seat.generation(1))
    group = place.enter()
    planned = seat.generation(2, leave_after=7)
    place.membership.announce(replace(planned, provisional=True))
    assert not place.membership.must_leave()
    began = time.monotonic()
    threading.Timer(0.1, place.membership.announce, [replace(planned, **settled)]).start()
    assert place.membership.await_settlement(7, 60.0)
    assert time.monotonic() - began >= 0.1
    assert place.membership.must_leave() is (not settled)
    assert not group.lost


@in_processes(1)
def test_waiting_for_a_settlement_ends_with_an_unplanned_change_or_a_timeout(seat: Seat) -> None:
    provisional = replace(seat.generation(2, leave_after=7), provisional=True)
    superseded, forgotten = Place("w0", seat.host), Place("w0", seat.host)
    for place in (superseded, forgotten):
        place.membership.announce(seat.generation(1))
        place.enter()
        place.membership.announce(provisional)
        if place is superseded:
            threading.Timer(0.1, place.membership.announce, [seat.generation(3)]).start()
            assert place.membership.await_settlement(7, 60.0)
            assert place.membership.must_leave()
            place.membership.leave()
    assert not forgotten.membership.await_settlement(7, 0.1)
    assert forgotten.membership.await_settlement(6, 60.0)  # not at the boundary yet
    forgotten.membership.leave()
    assert forgotten.enter().generation == provisional


def test_a_blocked_collective_is_freed_by_an_announcement() -> None:
    def block(seat: Seat) -> None:
        place = entered(seat)
        threading.Timer(0.1, place.membership.announce, [seat.generation(2)]).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            meet()
        assert time.monotonic() - began < place.membership.join_timeout_s / 3
        place.membership.report_loss(caught.value)
        left = place.reports[-1]
        assert (left.phase, left.generation, left.broken) == (WorkerPhase.READY, 1, False)
        seat.exchange("freed")
        assert place.enter().generation.number == 2
        meet()

    def stay_away(seat: Seat) -> None:
        place = entered(seat, "w1")
        seat.exchange("freed")
        place.membership.announce(seat.generation(2))
        place.membership.leave()
        place.enter()
        meet()

    run_together(block, stay_away)


def test_a_group_that_breaks_by_itself_is_reported_broken() -> None:
    def break_it(seat: Seat) -> None:
        place = entered(seat)
        seat.exchange("in")
        place.membership.abandon()
        seat.exchange("broken")

    def notice(seat: Seat) -> None:
        place = entered(seat, "w1")
        seat.exchange("in")
        seat.exchange("broken")
        with pytest.raises(RuntimeError) as caught:
            meet()
        place.membership.report_loss(caught.value)
        report = place.reports[-1]
        assert (report.phase, report.generation, report.broken) == (WorkerPhase.READY, 1, True)
        assert "gloo" in report.detail

    run_together(break_it, notice)


@in_processes(1)
def test_building_a_group_is_given_up_for_a_newer_one(seat: Seat) -> None:
    """The other member of generation 1 never comes; generation 2 does not need it."""
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
    with pytest.raises(GroupLost) as caught:
        place.enter()
    place.membership.report_loss(caught.value)
    assert not place.reports[-1].broken
    assert place.enter().generation.number == 2
    assert time.monotonic() - began < place.membership.join_timeout_s


@in_processes(1)
def test_a_group_aborted_while_its_members_agree_is_not_joined(seat: Seat) -> None:
    place = Place("w0", seat.host)
    place.membership.announce(seat.generation(1))
    place.membership.join(place.host, GLOO)
    place.membership.announce(seat.generation(2))
    with pytest.raises(GroupLost) as caught:
        place.membership.joined(7)
    assert WorkerPhase.TRAINING not in place.phases()
    place.membership.report_loss(caught.value)
    assert place.enter().generation.number == 2
    assert place.reports[-1].has_state


@in_processes(1)
def test_a_state_that_is_being_overwritten_is_not_offered_until_the_member_has_joined(
    seat: Seat,
) -> None:
    place = entered(seat)
    assert place.reports[-1].has_state
    place.membership.drop_state()
    assert not place.reports[-1].has_state
    place.membership.announce(seat.generation(2))
    place.membership.leave()
    place.enter()
    assert place.reports[-1].has_state


@pytest.fixture
def manners(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl_manners.register()
    return nccl_manners.BACKEND


@pytest.mark.parametrize("ends", ["lost", "abandoned", "left"])
def test_where_operations_queue_a_member_aborts_only_when_all_are_frozen(
    manners: Backend, ends: str
) -> None:
    """Before that another one would take what it sends for a result."""

    def hang(seat: Seat) -> None:
        place = entered(seat, backend=manners)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        seat.exchange("hangs")
        group = place.membership.group
        assert group is not None
        if ends == "abandoned":
            place.membership.abandon()
        else:
            place.membership.announce(replace(seat.generation(2), provisional=True))
            assert group.lost
            if ends == "left":
                place.membership.leave()
            else:
                place.membership.report_loss(GroupLost("frozen"))
            assert place.reports[-1].phase is WorkerPhase.READY
        time.sleep(0.2)
        assert not work.is_completed()
        seat.exchange("waits")
        place.membership.announce(seat.generation(2))
        work.wait()
        if ends != "abandoned":
            assert place.enter().generation.number == 2
            seat.exchange("entered")  # this member hosts their store
            place.membership.finish()

    def stay_away(seat: Seat) -> None:
        place = entered(seat, "w1", manners)
        seat.exchange("hangs")
        seat.exchange("waits")
        if ends != "abandoned":
            place.membership.announce(seat.generation(2))
            place.membership.leave()
            place.enter()
            seat.exchange("entered")

    run_together(hang, stay_away)


@in_processes(1)
def test_a_result_that_was_not_known_before_its_group_was_frozen_does_not_count(
    seat: Seat, manners: Backend
) -> None:
    group = seat.join(backend=manners)
    dist.all_reduce(torch.ones(1))
    group.settle()
    dist.all_reduce(torch.ones(1))
    group.freeze()
    with pytest.raises(GroupLost):
        group.settle()
