"""Where a planned change takes effect, once all who are to leave have heard of it."""

from __future__ import annotations

import pytest

from elastic.core.coordinator.planned import settle
from elastic.core.invariants import InvariantBroken
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
NEW = status("c0", JOINING, 4, took_part=False)


def heard(worker: str, committed: int) -> WorkerStatus:
    return status(worker, TRAINING, 3, heard=4, committed=committed)


def deaf(worker: str, committed: int) -> WorkerStatus:
    return status(worker, TRAINING, 3, committed=committed)


def left(worker: str, committed: int) -> WorkerStatus:
    return status(worker, READY, 3, heard=4, committed=committed)


def done(worker: str, committed: int) -> WorkerStatus:
    return status(worker, FINISHED, 3, committed=committed)


@pytest.mark.parametrize(
    ("workers", "leave_after"),
    [
        # In time: everybody will wait at the boundary that was named.
        ((heard("a0", 5), heard("b0", 8)), 9),
        # Late: whoever has committed 9 or 11 may be in the step after it.
        ((heard("a0", 8), heard("b0", 9)), 10),
        ((heard("a0", 10), heard("b0", 11)), 12),
        # One has not heard: nobody knows how far it gets.
        ((heard("a0", 5), deaf("b0", 5)), None),
        ((deaf("a0", 9), heard("b0", 9)), None),
        # One has left: it was tired of waiting, or the group broke. No further step is possible.
        ((left("a0", 9), deaf("b0", 9)), 9),
        ((left("a0", 7), heard("b0", 8)), 7),
        ((status("a0", JOINING, 4, committed=9), heard("b0", 9)), 9),
        # One is at the end of the job, and needs no group any more.
        ((done("a0", 8), heard("b0", 7)), 9),
        ((done("a0", 8), done("b0", 8)), 9),
        # One is lost: an unplanned change follows.
        ((heard("a0", 5),), None),
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


def test_what_is_settled_is_not_settled_again() -> None:
    with pytest.raises(InvariantBroken):
        settle(generation(4, "a0", leave_after=9), PAIR, {})


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
    ],
)
def test_news(following: Generation, known: Generation | None, news: bool) -> None:
    assert following.is_news_after(known) is news
