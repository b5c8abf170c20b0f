"""Which mark a member that is behind receives, by the place that its script is at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.recovery import Declaration, Mark, plan_recovery

NOTHING = Declaration(committed=0, intact=False, signature=0)


def at_place(committed: int, **place: object) -> Declaration:
    """A member that took part and holds its state at both marks."""
    here = Declaration(
        committed=committed,
        committed_in=1,
        intact=True,
        signature=0,
        took_part=True,
        commit_digest=committed,
        begin_digest=committed,
    )
    return replace(here, **place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declarations", "mark", "stranded"),
    [
        # The receiver's script is at the end of the block that the other completed, or elsewhere.
        ([at_place(6), at_place(5, in_block=True)], Mark.COMMIT, ()),
        ([at_place(6), at_place(5)], Mark.BEGIN, ()),
        ([at_place(6, commit_digest=0), at_place(5, in_block=True)], Mark.BEGIN, (1,)),
        # The receiver is in a block of an earlier loop, which it leaves together with the loop.
        ([at_place(6, loop=1, state_loop=1), at_place(5, in_block=True)], Mark.BEGIN, ()),
        # The receiver has as many steps or more, which do not count: it has to do the block again.
        ([at_place(6, committed_in=2), at_place(6, in_block=True)], Mark.BEGIN, ()),
        ([at_place(6, committed_in=2), at_place(7, in_block=True)], Mark.BEGIN, ()),
        # The receiver comes to calls that the other has made: only the last one can be repeated.
        ([at_place(6, runs_done=1, repeats=True), at_place(5, in_block=True)], Mark.COMMIT, ()),
        ([at_place(6, runs_done=1), at_place(5, in_block=True)], Mark.COMMIT, (1,)),
        ([at_place(6, runs_done=2, repeats=True), at_place(5, in_block=True)], Mark.COMMIT, (1,)),
        # The receiver is in a call of an older state, or at a boundary while the other is in one.
        ([at_place(6), at_place(5, in_run=True)], Mark.BEGIN, (1,)),
        ([at_place(6, in_run=True), at_place(5)], Mark.BEGIN, (1,)),
    ],
)
def test_a_member_that_is_behind_receives_the_mark_that_fits_its_place(
    declarations: list[Declaration], mark: Mark, stranded: tuple[int, ...]
) -> None:
    plan = plan_recovery(declarations)
    assert [(t.target, t.mark) for t in plan.transfers] == [(1, mark)]
    assert plan.stranded == stranded


def test_a_member_two_calls_behind_is_stranded() -> None:
    late, others = at_place(6, in_run=True), at_place(6, runs_done=2, repeats=True)
    assert plan_recovery([late, others, others]).stranded == (0,)
    assert plan_recovery([replace(late, runs_done=1), others, others]).stranded == ()


def test_a_newcomer_does_not_receive_from_a_member_at_the_end_of_a_block() -> None:
    at_end = at_place(6, begin_digest=0, in_block=True)
    plan = plan_recovery([at_end, at_place(6), NOTHING, NOTHING])
    assert [(t.source, t.target) for t in plan.transfers] == [(1, 2), (2, 3)]
