"""The worker's machine: when it joins a group, leaves it and aborts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.invariants import InvariantBroken
from elastic.core.membership import ChangeReason, Generation, Purpose, WorkerPhase
from elastic.core.worker.machine import AbortGroup, ReportStatus, Worker
from tests.unit.core.cluster_views import generation

FIRST = generation(1, "a0", "b0")
WITHOUT_IT = generation(2, "b0")
AT_ONCE = generation(2, "a0")
PLANNED = generation(2, "a0", "b0", "c0", leave_after=7)
PROVISIONAL = replace(PLANNED, provisional=True)


def ready() -> Worker:
    worker = Worker("a0")
    worker.attached()
    worker.assigned(0)
    worker.prepared("a:1")
    return worker


def joining() -> Worker:
    worker = ready()
    worker.generation_announced(FIRST)
    worker.join_began(FIRST)
    return worker


def training(committed: int = 5) -> Worker:
    worker = joining()
    worker.joined(FIRST, committed)
    return worker


def test_a_worker_that_has_joined_reports_that_it_trains_and_has_the_state() -> None:
    worker = training()
    assert worker.status.phase is WorkerPhase.TRAINING
    assert (worker.status.generation, worker.status.committed) == (1, 5)
    assert worker.status.has_state


def test_a_worker_is_out_of_time_once_the_job_stops_and_members_do_not_come_to_the_save() -> None:
    stalled, stops = ChangeReason.STALLED, {"purpose": Purpose.SAVE_AND_LEAVE}
    for known, expected in (({"reason": stalled}, False), (stops, False)):
        worker = training()
        worker.generation_announced(replace(AT_ONCE, **known))
        assert worker.is_out_of_time is expected
    worker = training()
    worker.generation_announced(replace(AT_ONCE, reason=stalled, **stops))
    worker.generation_announced(replace(AT_ONCE, number=AT_ONCE.number + 1, **stops))
    assert worker.is_out_of_time


@pytest.mark.parametrize(("purpose", "expected"), [(Purpose.TRAIN, 2), (Purpose.SAVE_AND_LEAVE, 1)])
def test_a_group_that_only_saves_does_not_change_trained_in(
    purpose: Purpose, expected: int
) -> None:
    worker, second = training(), replace(AT_ONCE, purpose=purpose)
    worker.generation_announced(second)
    worker.group_left(5)
    worker.join_began(second)
    worker.joined(second, 5)
    assert worker.status.trained_in == expected


def test_a_repeated_slot_changes_nothing_and_another_one_breaks_an_invariant() -> None:
    worker = ready()
    assert worker.assigned(0) == []
    assert worker.status.phase is WorkerPhase.READY
    with pytest.raises(InvariantBroken):
        worker.assigned(1)


@pytest.mark.parametrize(
    ("announced", "joinable"), [(None, False), (WITHOUT_IT, False), (AT_ONCE, True)]
)
def test_only_members_join_a_generation(announced: Generation | None, joinable: bool) -> None:
    worker = ready()
    if announced is not None:
        worker.generation_announced(announced)
    assert worker.joinable() == (announced if joinable else None)


def test_a_generation_that_broke_is_not_joined_again() -> None:
    worker = training()
    worker.group_broke(5, "reset")
    assert worker.joinable() is None
    worker.generation_announced(AT_ONCE)
    assert worker.joinable() is AT_ONCE
    worker.join_began(AT_ONCE)
    assert not worker.status.broken


@pytest.mark.parametrize(
    ("announced", "aborts", "leaves_at"),
    [(FIRST, False, None), (AT_ONCE, True, 5), (WITHOUT_IT, True, 5), (PLANNED, False, 7)],
)
def test_a_worker_leaves_at_once_or_at_the_boundary_of_a_planned_change(
    announced: Generation, aborts: bool, leaves_at: int | None
) -> None:
    worker = training(5)
    effects = worker.generation_announced(announced)
    assert (AbortGroup(generation=1) in effects) == aborts
    boundaries = [step for step in range(5, 10) if worker.must_leave(step)]
    assert (boundaries[0] if boundaries else None) == leaves_at


@pytest.mark.parametrize(
    ("settled_after", "waits", "leaves"),
    [(None, [7, 8], []), (7, [], [7, 8]), (8, [], [8])],
)
def test_a_worker_waits_at_a_provisional_boundary_and_leaves_at_a_settled_one(
    settled_after: int | None, waits: list[int], leaves: list[int]
) -> None:
    worker = training(5)
    assert not worker.must_wait(5)
    assert [type(e) for e in worker.generation_announced(PROVISIONAL)] == [ReportStatus]
    if settled_after is not None:
        assert worker.generation_announced(replace(PLANNED, leave_after=settled_after)) == []
    assert [step for step in range(5, 9) if worker.must_wait(step)] == waits
    assert [step for step in range(5, 9) if worker.must_leave(step)] == leaves


def test_a_change_at_once_supersedes_a_provisional_one() -> None:
    worker = training(5)
    worker.generation_announced(PROVISIONAL)
    effects = worker.generation_announced(generation(3, "a0"))
    assert AbortGroup(generation=1) in effects
    assert worker.must_leave(7)
    assert not worker.must_wait(7)


@pytest.mark.parametrize("known", [PROVISIONAL, PLANNED])
def test_a_planned_change_that_becomes_one_at_once_aborts_the_group(known: Generation) -> None:
    worker = training(7)
    worker.generation_announced(known)
    at_once = replace(PLANNED, leave_after=None)
    assert worker.generation_announced(at_once) == [AbortGroup(generation=1)]
    assert worker.superseded()
    assert worker.must_leave(5)


@pytest.mark.parametrize("leave_after", [7, None])
def test_a_group_is_not_left_for_another_form_of_its_own_generation(
    leave_after: int | None,
) -> None:
    worker = training(7)
    worker.generation_announced(PROVISIONAL)
    worker.group_left(7)
    worker.join_began(PROVISIONAL)
    assert worker.generation_announced(replace(PLANNED, leave_after=leave_after)) == []
    worker.joined(PROVISIONAL, 7)
    assert worker.following is None
    assert not worker.must_leave(7)


def test_an_acknowledgement_reports_the_steps_committed_by_then() -> None:
    worker = training(5)
    worker.committed(6)
    worker.run_entered()
    (report,) = worker.generation_announced(PROVISIONAL)
    assert isinstance(report, ReportStatus)
    said = report.status
    assert (said.acknowledged, said.committed, said.in_run) == (2, 6, True)


def test_a_worker_reports_before_it_aborts_its_group() -> None:
    effects = training().generation_announced(AT_ONCE)
    assert [type(e) for e in effects] == [ReportStatus, AbortGroup]


def test_an_older_generation_is_ignored() -> None:
    worker = training()
    worker.generation_announced(AT_ONCE)
    assert worker.generation_announced(FIRST) == []
    assert worker.status.acknowledged == 2


@pytest.mark.parametrize(("announced", "expected"), [(AT_ONCE, True), (PLANNED, False)])
def test_a_join_is_given_up_only_for_a_change_at_once(
    announced: Generation, expected: bool
) -> None:
    worker = joining()
    worker.generation_announced(announced)
    assert worker.superseded() is expected


def test_a_worker_that_dropped_its_state_has_none_until_it_has_joined_again() -> None:
    worker = joining()
    worker.joined(FIRST, 3)
    worker.group_broke(3, "reset")
    worker.generation_announced(AT_ONCE)
    worker.join_began(AT_ONCE)
    worker.state_dropped()
    assert not worker.status.has_state
    worker.joined(AT_ONCE, 4)
    assert worker.status.has_state


def test_an_event_out_of_order_breaks_an_invariant() -> None:
    with pytest.raises(InvariantBroken):
        Worker("a0").prepared("a:1")


def test_a_join_is_given_up_for_a_planned_change_of_a_later_group() -> None:
    """Its boundary is one of a group that this worker is not in."""
    worker = joining()
    missed_one = replace(PLANNED, number=3)
    assert AbortGroup(generation=1) in worker.generation_announced(missed_one)
    assert worker.superseded()
    assert worker.must_leave(0)
    assert not worker.must_wait(8)


def test_a_worker_that_lost_its_group_waits_until_a_planned_change_is_settled() -> None:
    worker = training()
    worker.generation_announced(PROVISIONAL)
    worker.group_broke(5, "reset")
    assert worker.joinable() is None
    settled = replace(PLANNED, leave_after=None)
    worker.generation_announced(settled)
    assert worker.joinable() is settled


@pytest.mark.parametrize(("committed", "joins"), [(6, False), (7, True)])
def test_a_worker_whose_group_broke_before_the_boundary_waits(committed: int, joins: bool) -> None:
    """A member that the change drops may have completed the step that this one has lost."""
    worker = training()
    worker.generation_announced(PLANNED)
    worker.group_broke(committed, "reset")
    assert worker.joinable() == (PLANNED if joins else None)


def test_a_worker_that_lost_an_earlier_group_joins_at_once() -> None:
    """The boundary is one of a group that this worker is not in."""
    missed_one = replace(PLANNED, number=3)
    worker = training()
    worker.generation_announced(missed_one)
    worker.group_broke(5, "reset")
    assert worker.joinable() is missed_one
