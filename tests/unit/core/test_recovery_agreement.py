"""Which calls of session.run a new group repeats, and which members track another model."""

from __future__ import annotations

import pytest

from elastic.core.recovery import Declaration, mismatching_ranks, runs_to_repeat


def veteran(runs_done: int, *, in_run: bool = False, committed: int = 5) -> Declaration:
    return Declaration(
        committed=committed,
        intact=True,
        signature=0,
        took_part=True,
        runs_done=runs_done,
        in_run=in_run,
    )


def tracks(signature: int, *, intact: bool) -> Declaration:
    return Declaration(committed=0, intact=intact, signature=signature)


NEWCOMER = Declaration(committed=0, intact=False, signature=0)


@pytest.mark.parametrize(
    ("declarations", "repeat_from"),
    [
        ([NEWCOMER, NEWCOMER], 0),
        ([veteran(0), veteran(0)], 0),
        ([veteran(3), veteran(2, in_run=True)], 2),
        ([veteran(3, in_run=True), veteran(3, in_run=True)], 3),
        # One has committed another step meanwhile, and counts its runs since then.
        ([veteran(1, committed=6), veteran(4, committed=5)], 1),
        # Between calls a newcomer takes over the count; inside one it cannot.
        ([veteran(2), NEWCOMER], 2),
        ([veteran(2, in_run=True), NEWCOMER], None),
        ([veteran(2, in_run=True), veteran(2), NEWCOMER], None),
    ],
)
def test_calls_are_repeated_from_the_one_that_the_slowest_veteran_is_at(
    declarations: list[Declaration], repeat_from: int | None
) -> None:
    assert runs_to_repeat(declarations) == repeat_from
    assert runs_to_repeat(declarations[::-1]) == repeat_from


@pytest.mark.parametrize(
    ("declarations", "reference", "odd"),
    [
        ([tracks(1, intact=True), tracks(1, intact=False)], 0, ()),
        ([tracks(1, intact=False), tracks(2, intact=True), tracks(1, intact=False)], 1, (0, 2)),
        ([tracks(1, intact=False), tracks(2, intact=False)], 0, (1,)),
        ([tracks(1, intact=True), tracks(2, intact=True)], 0, (1,)),
    ],
    ids=[
        "alike",
        "the holder is right",
        "nobody does: rank 0",
        "both do: the first",
    ],
)
def test_members_whose_model_is_not_the_references_are_odd(
    declarations: list[Declaration], reference: int, odd: tuple[int, ...]
) -> None:
    assert mismatching_ranks(declarations) == (reference, odd)
