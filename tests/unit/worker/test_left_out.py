"""A rank that leaves out an all-reduce, or makes one too many, is refused in that very step."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.unit.worker.leaving_out import BY_HAND, OPTIONS, RIGHT, STEPS, WRONG, Case, Outcome, play

CASES = 300
PLAIN = Case(world=2, rank=1, step=9, style="", factor=0.0, model=0, options=0, every=1)


@functools.cache
def undisturbed(world: int, options: int, every: int) -> Outcome:
    case = replace(PLAIN, world=world, options=options, every=every)
    first, *others = play(case, undisturbed=True)
    assert first.finished
    assert len(first.digests) == STEPS
    assert all(other == first for other in others)
    return first


def judge(case: Case) -> None:
    outcomes = play(case)
    right = undisturbed(case.world, case.options, case.every)
    for outcome in outcomes:
        before = outcome.digests[: case.step]
        if outcome.ended and len(before) == case.step - 1:
            # The refused member ended while the last messages of the step before were on their way.
            assert before == right.digests[: case.step - 1]
            continue
        assert before == right.digests[: case.step]
    if case.style in RIGHT:
        assert all(outcome.finished for outcome in outcomes)
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert len(outcomes[0].digests) == STEPS
        return
    assert not any(outcome.finished for outcome in outcomes), "nobody goes on"
    if not any(outcome.refused for outcome in outcomes):
        # They stood still in collectives of two kinds. The next group begins the step again.
        assert all(o.digests == right.digests[: len(o.digests)] for o in outcomes), outcomes
    odd = outcomes[case.rank]
    lead = len(odd.digests) - case.step
    assert lead in (0, odd.doubtful), "the odd rank's step does not count"


@pytest.mark.parametrize("style", [*WRONG, *RIGHT])
def test_each_way_to_leave_a_reduction_out_is_refused_or_right(style: str) -> None:
    """The factor of 0 leaves no trace in the gradients; the second model leaves a first one whose
    reductions were made."""
    judge(replace(PLAIN, style=style, model=len(style) % 2))


@pytest.mark.parametrize("style", ["once_more", "before", "other", "looks"])
def test_so_it_is_if_the_other_model_follows(style: str) -> None:
    judge(replace(PLAIN, style=style, model=0))


@pytest.mark.parametrize("options", range(1, len(OPTIONS)))
def test_a_model_that_is_left_out_is_refused_with_each_option_of_ddp(options: int) -> None:
    judge(replace(PLAIN, style="nothing", model=options % 2, options=options, every=3))


def test_a_look_at_a_model_in_the_step_that_orders_its_buckets_is_no_slip() -> None:
    """DDP agrees on the order in a forward pass, by collectives of its own."""
    judge(replace(PLAIN, style="looks", step=1))


def test_a_collective_too_many_is_refused_where_members_meet_next() -> None:
    """It has met the others' next reduction. Only the numbers of collectives show that."""
    assert list(BY_HAND) == ["by_hand"]
    case = replace(PLAIN, style="by_hand", factor=1.0)
    outcomes = play(case)
    assert any(outcome.refused for outcome in outcomes), outcomes
    assert not any(outcome.finished for outcome in outcomes)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(CASES))
def test_random_cases_are_refused_in_that_very_step_or_right(seed: int) -> None:
    judge(Case.drawn(seed))
