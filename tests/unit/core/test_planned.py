"""At which step a planned change takes effect once all leaving members have acknowledged it."""

from __future__ import annotations

import pytest

from elastic.core.coordinator.formation import settle
from elastic.core.membership import Generation, WorkerStatus
from tests.unit.core.cluster_views import (
    FINISHED,
    JOINING,
    READY,
    TRAINING,
    generation,
    status,
    view,
)

PAIR = generation(3, "a0", "b0")
PLANNED = generation(4, "a0", "b0", "c0", leave_after=9, provisional=True)
NEW = status("c0", JOINING, 4, has_state=False)


def acknowledged(worker: str, committed: int) -> WorkerStatus:
    return status(worker, TRAINING, 3, acknowledged=4, committed=committed)


def deaf(worker: str, committed: int) -> WorkerStatus:
    return status(worker, TRAINING, 3, committed=committed)


def left(worker: str, committed: int) -> WorkerStatus:
    return status(worker, READY, 3, acknowledged=4, committed=committed)


def done(worker: str, committed: int) -> WorkerStatus:
    return status(worker, FINISHED, 3, committed=committed)


@pytest.mark.parametrize(
    ("workers", "leave_after"),
    [
        # In time: all members will wait at the boundary that was named.
        ((acknowledged("a0", 5), acknowledged("b0", 8)), 9),
        # Late: a member that has committed 9 or 11 may be in the step after it.
        ((acknowledged("a0", 8), acknowledged("b0", 9)), 10),
        ((acknowledged("a0", 10), acknowledged("b0", 11)), 12),
        # One has not acknowledged: nobody knows how far it gets.
        ((acknowledged("a0", 5), deaf("b0", 5)), None),
        ((deaf("a0", 9), acknowledged("b0", 9)), None),
        # One has finished the job and no longer needs a group.
        ((done("a0", 8), acknowledged("b0", 7)), 9),
        ((done("a0", 8), done("b0", 8)), 9),
        # One is lost: an unplanned change follows.
        ((acknowledged("a0", 5),), None),
    ],
)
def test_the_boundary_is_settled_after_the_furthest_member_once_all_have_acknowledged(
    workers: tuple[WorkerStatus, ...], leave_after: int | None
) -> None:
    settled = settle(PLANNED, PAIR, view(PAIR, NEW, *workers).workers)
    if leave_after is None:
        assert settled is None
    else:
        assert settled is not None
        assert settled == generation(4, "a0", "b0", "c0", leave_after=leave_after)
        assert settled.is_news_after(PLANNED)


SETTLED = generation(4, "a0", "b0", "c0", leave_after=9)
AT_ONCE = generation(4, "a0", "b0", "c0")


@pytest.mark.parametrize(
    ("known", "workers", "at_once"),
    [
        # One has left, because its wait timed out or the group broke: no more steps are possible.
        (PLANNED, (left("a0", 9), deaf("b0", 9)), True),
        (PLANNED, (left("a0", 7), acknowledged("b0", 8)), True),
        (PLANNED, (status("a0", JOINING, 4, committed=9), acknowledged("b0", 9)), True),
        # One left before the settled boundary, which the others cannot reach without it.
        (SETTLED, (left("a0", 8), acknowledged("b0", 8)), True),
        (SETTLED, (status("a0", JOINING, 4, committed=8), acknowledged("b0", 8)), True),
        # The members reach the boundary one by one.
        (SETTLED, (left("a0", 9), acknowledged("b0", 8)), False),
        (SETTLED, (acknowledged("a0", 8), acknowledged("b0", 8)), False),
        (SETTLED, (done("a0", 8), acknowledged("b0", 8)), False),
        # The members have been told already.
        (AT_ONCE, (left("a0", 8), acknowledged("b0", 8)), False),
    ],
)
def test_members_that_cannot_reach_the_boundary_leave_at_once(
    known: Generation, workers: tuple[WorkerStatus, ...], at_once: bool
) -> None:
    settled = settle(known, PAIR, view(PAIR, NEW, *workers).workers)
    assert settled == (AT_ONCE if at_once else None)


@pytest.mark.parametrize(
    ("members", "at_once"),
    [
        ((), True),  # nobody goes on, so nobody can go on with fewer steps than a0
        (("a0", "b0"), True),
        (("b0",), False),  # a0 may have a step that b0 lacks: an unplanned change follows
    ],
)
def test_members_that_wait_in_a_broken_group_leave_at_once_if_no_step_can_be_lost(
    members: tuple[str, ...], at_once: bool
) -> None:
    planned = generation(4, *members, leave_after=9, provisional=True)
    broken = status("a0", READY, 3, acknowledged=4, committed=8, broken=True)
    settled = settle(planned, PAIR, view(PAIR, broken, acknowledged("b0", 8)).workers)
    assert settled == (generation(4, *members) if at_once else None)


@pytest.mark.parametrize(
    ("following", "known", "news"),
    [
        (PLANNED, None, True),
        (PLANNED, PAIR, True),
        (PAIR, PLANNED, False),
        (PLANNED, PLANNED, False),
        (generation(4, "a0", leave_after=9), PLANNED, True),
        (PLANNED, generation(4, "a0", leave_after=9), False),
        (generation(4, "a0"), generation(4, "a0"), False),
        (AT_ONCE, PLANNED, True),
        (AT_ONCE, SETTLED, True),
        (SETTLED, AT_ONCE, False),
        (PLANNED, AT_ONCE, False),
    ],
)
def test_a_generation_is_news_after_an_earlier_generation_or_an_earlier_form_of_it(
    following: Generation, known: Generation | None, news: bool
) -> None:
    assert following.is_news_after(known) is news
