"""A saved state counts unless a later group has gone on from an earlier step."""

from __future__ import annotations

import pytest

from elastic.core.forks import MOST_FORKS, Fork, counts, with_fork

RUN = (Fork("a", 1, 0), Fork("a", 3, 40), Fork("a", 5, 100))
RESUMED = (*RUN, Fork("b", 1, 90))


@pytest.mark.parametrize(
    ("forks", "run", "generation", "step", "expected"),
    [
        ((), "a", 1, 260, True),
        (RUN, "a", 1, 40, True),  # an ancestor, from before the job went back
        (RUN, "a", 1, 41, False),
        (RUN, "a", 2, 60, False),
        (RUN, "a", 3, 100, True),
        (RUN, "a", 4, 100, True),
        (RUN, "a", 4, 101, False),
        (RUN, "a", 5, 500, True),
        (RUN, "a", 9, 500, True),
        (RUN, "", 7, 41, False),  # of format version 1
        (RUN, "", 7, 0, True),
        (RESUMED, "a", 5, 90, True),
        (RESUMED, "a", 5, 91, False),
        (RESUMED, "a", 1, 60, False),  # void already when the run was resumed
        (RESUMED, "b", 1, 300, True),
        (RESUMED, "c", 1, 300, False),
    ],
)
def test_a_state_counts(
    forks: tuple[Fork, ...], run: str, generation: int, step: int, expected: bool
) -> None:
    assert counts(forks, run, generation, step) is expected


def test_a_fork_of_an_earlier_group_that_is_told_late_changes_nothing() -> None:
    assert with_fork(RUN, Fork("a", 4, 10)) == RUN
    assert with_fork(RUN, Fork("a", 5, 10)) == RUN
    assert with_fork(RUN, Fork("a", 6, 10)) == (*RUN, Fork("a", 6, 10))


def test_the_newest_forks_are_remembered() -> None:
    forks: tuple[Fork, ...] = ()
    for number in range(1, 200):
        forks = with_fork(forks, Fork("a", number, number))
    assert len(forks) == MOST_FORKS
    assert forks[-1] == Fork("a", 199, 199)
