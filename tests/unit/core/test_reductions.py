"""Members that have made different reductions are found, and members that were cut off are not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic.core.recovery import Declaration
from elastic.core.reductions import MOST_MODELS, Rhythm, disagreement, in_words


def unexpected(counts: Sequence[int]) -> list[int]:
    """The steps whose number of reductions was not expected."""
    rhythm, found = Rhythm(), []
    for step, count in enumerate(counts):
        if rhythm.expected != ((count, 0),):
            found.append(step)
        rhythm.note(((count, 0),))
    return found


def test_only_the_first_step_is_unexpected_if_all_make_the_same() -> None:
    assert unexpected([2] * 100) == [0]


def test_buckets_that_are_built_again_after_the_first_step_are_unexpected_once() -> None:
    assert unexpected([1, *[2] * 50]) == [0, 1]


def test_a_second_model_in_every_fifth_step_is_expected_after_its_first_rounds() -> None:
    assert unexpected([1, 1, 1, 1, 2] * 20) == [0, 4, 5]


def test_a_pause_that_lasts_longer_than_before_is_unexpected_once() -> None:
    assert unexpected([1, 1, 2, 1, 1, 1, 1, 1, 2]) == [0, 2, 3, 5, 8]


def test_equal_numbers_of_reductions_of_other_models_are_unexpected_and_named() -> None:
    rhythm = Rhythm()
    rhythm.note(((1, 0b01), (1, 0b10)))
    assert rhythm.expected != ((1, 0b01), (1, 0b01))
    assert in_words(((1, 0b01), (2, 0b11))) == "1+2 reductions (of model 1, then model 1 and 2)"
    assert in_words(((1, 0), (0, 0))) == "1+0 reductions"
    assert in_words(()) == "0 reductions"
    other = (1, 0b01 | 0xAB << MOST_MODELS)
    assert in_words((other,)) == "1 reductions (of model 1) with the frozen parameters ab"
    assert (
        in_words(((1, 0), (0, -2))) == "1 reductions and 2 other collectives, as by loss.backward()"
    )


@pytest.mark.parametrize("step", range(20, 30))
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_step_that_leaves_the_rhythm_is_unexpected(step: int, count: int) -> None:
    counts = [1, 1, 1, 1, 2] * 10
    if counts[step] != count:
        assert step in unexpected([*counts[:step], count, *counts[step + 1 :]])


def member(committed: int, reduced: int, begun: int = -1, group: int = 3) -> Declaration:
    return Declaration(
        committed=committed,
        intact=True,
        signature=0,
        took_part=True,
        group=group,
        reduced=reduced,
        begun=reduced if begun < 0 else begun,
    )


NEWCOMER = Declaration(committed=0, intact=False, signature=0)
FITTING = {
    "equal": [member(9, 18), member(9, 18), NEWCOMER],
    "one ahead by a whole step": [member(9, 18), member(8, 16, 17), member(8, 16, 18)],
    "one ahead that has begun the next": [member(9, 18, 19), member(8, 16, 18)],
    "of another group": [member(9, 18), member(3, 2, group=2), member(12, 1, group=0)],
    "newcomers": [NEWCOMER, NEWCOMER],
    "uncounted": [member(9, 0), member(8, 0)],
}
ODD = {
    "fewer reductions in equal steps": ([member(9, 18), member(9, 17)], (1,)),
    "a lead of two steps": ([member(7, 14), member(9, 18)], (0,)),
    "a lead with fewer reductions": ([member(9, 17), member(8, 16, 18), member(8, 16, 17)], (1,)),
    "in the second of two groups": (
        [member(9, 18, group=2), member(9, 18), member(9, 17)],
        (2,),
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_members_that_a_loss_can_leave_behind_fit(case: str) -> None:
    assert disagreement(FITTING[case]) is None


@pytest.mark.parametrize("case", ODD)
def test_members_that_no_loss_leaves_behind_are_named(case: str) -> None:
    declared, odd = ODD[case]
    found = disagreement(declared)
    assert found is not None
    assert found.odd == odd
    assert found.ahead
    assert found.committed == 9
