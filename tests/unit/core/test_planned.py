"""Where a planned change takes effect, once all who are to leave have heard of it."""

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
        # In time: everybody will wait at the boundary that was named.
        ((acknowledged("a0", 5), acknowledged("b0", 8)), 9),
        # Late: a member that has committed 9 or 11 may be in the step after it.
        ((acknowledged("a0", 8), acknowledged("b0", 9)), 10),
        ((acknowledged("a0", 10), acknowledged("b0", 11)), 12),
        # One has not heard: nobody knows how far it gets.
        ((acknowledged("a0", 5), deaf("b0", 5)), None),
        ((deaf("a0", 9), acknowledged("b0", 9)), None),
        # One is at the end of the job, and needs no group any more.
        ((done("a0", 8), acknowledged("b0", 7)), 9),
        ((done("a0", 8), done("b0", 8)), 9),
        # One is lost: an unplanned change follows.
        ((acknowledged("a0", 5),), None),
    ],
)
def test_where_the_group_is_left(
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
        # One has left: it was tired of waiting, or the group broke. No further step is possible.
        (PLANNED, (left("a0", 9), deaf("b0", 9)), True),
        (PLANNED, (left("a0", 7), acknowledged("b0", 8)), True),
        (PLANNED, (status("a0", JOINING, 4, committed=9), acknowledged("b0", 9)), True),
        # It left while the boundary was settled, to which the others cannot come without it.
        (SETTLED, (left("a0", 8), acknowledged("b0", 8)), True),
        (SETTLED, (status("a0", JOINING, 4, committed=8), acknowledged("b0", 8)), True),
        # They come to it one by one.
        (SETTLED, (left("a0", 9), acknowledged("b0", 8)), False),
        (SETTLED, (acknowledged("a0", 8), acknowledged("b0", 8)), False),
        (SETTLED, (done("a0", 8), acknowledged("b0", 8)), False),
        # They know.
        (AT_ONCE, (left("a0", 8), acknowledged("b0", 8)), False),
    ],
)
def test_who_cannot_come_to_the_boundary_leaves_at_once(
    known: Generation, workers: tuple[WorkerStatus, ...], at_once: bool
) -> None:
    settled = settle(known, PAIR, view(PAIR, NEW, *workers).workers)
    assert settled == (AT_ONCE if at_once else None)


@pytest.mark.parametrize(
    ("members", "at_once"),
    [
        ((), True),  # nobody goes on, so that nobody can go on from less than it has
        (("a0", "b0"), True),
        (("b0",), False),  # it may have a step that b0 has not: an unplanned change follows
    ],
)
def test_who_waits_in_a_group_that_broke_leaves_at_once(
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
def test_news(following: Generation, known: Generation | None, news: bool) -> None:
    assert following.is_news_after(known) is news
