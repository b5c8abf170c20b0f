"""Whose state a new group goes on from, and which mark of it each receiver gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.recovery import Declaration, Mark, RecoveryPlan, plan_recovery

RIGHT, WRONG = 7, 13


def held(committed: int, committed_in: int = 1, digest: int = RIGHT) -> Declaration:
    """A veteran at a boundary, with both marks."""
    return Declaration(
        committed=committed,
        committed_in=committed_in,
        intact=True,
        signature=0,
        took_part=True,
        commit_digest=digest + 1000,
        begin_digest=digest,
    )


def in_block(declaration: Declaration) -> Declaration:
    return replace(declaration, in_block=True)


def without_commit(declaration: Declaration) -> Declaration:
    return replace(declaration, commit_digest=0)


def without_begin(declaration: Declaration) -> Declaration:
    """A member whose script is between a commit and the next boundary."""
    return replace(declaration, begin_digest=0)


NEWCOMER = Declaration(committed=0, intact=False, signature=0)
TORN = replace(held(9, 9), intact=False)


def pairs(plan: RecoveryPlan) -> list[tuple[int, int]]:
    return [(t.source, t.target) for t in plan.transfers]


def marked(plan: RecoveryPlan) -> list[tuple[int, int, Mark]]:
    return [(t.source, t.target, t.mark) for t in plan.transfers]


@pytest.mark.parametrize(
    ("declarations", "committed", "transfers"),
    [
        ([held(5), held(5)], 5, []),
        ([held(5), held(6)], 6, [(1, 0)]),
        ([NEWCOMER, held(5), held(5), NEWCOMER], 5, [(1, 0), (2, 3)]),
        ([NEWCOMER, NEWCOMER], None, [(0, 1)]),
        ([TORN, held(5)], 5, [(1, 0)]),
        # Step 6 was committed twice: the commit of the later generation counts.
        ([held(6, 1), held(6, 2)], 6, [(1, 0)]),
        ([held(9, 1), held(6, 2)], 6, [(1, 0)]),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"took_part": False, "commit_digest": 0, "begin_digest": 0}],
    ids=["at both marks", "at none"],
)
def test_members_receive_the_most_advanced_state_of_the_newest_lineage(
    declarations: list[Declaration],
    committed: int | None,
    transfers: list[tuple[int, int]],
    changes: dict[str, Any],
) -> None:
    plan = plan_recovery([replace(d, **changes) for d in declarations])
    assert plan.committed == committed
    assert pairs(plan) == transfers
    assert not plan.stranded


@pytest.mark.parametrize(
    ("declarations", "begun"),
    [
        ([NEWCOMER, NEWCOMER], False),
        ([NEWCOMER, TORN], True),
        ([replace(TORN, committed=0)], False),  # torn in the first step: there is nothing to lose
        # A newcomer that has not received the whole state has never held it.
        ([replace(NEWCOMER, committed=9)], False),
    ],
)
def test_a_job_has_begun_if_a_torn_member_had_committed(
    declarations: list[Declaration], begun: bool
) -> None:
    plan = plan_recovery(declarations)
    assert plan.committed is None
    assert plan.begun is begun


# ---- members of one step whose states differ


@pytest.mark.parametrize(
    ("digests", "differed", "transfers"),
    [
        ([RIGHT, RIGHT, WRONG], (2,), [(0, 2)]),
        ([WRONG, RIGHT, RIGHT], (0,), [(1, 0)]),
        ([RIGHT, WRONG], (1,), [(0, 1)]),
        ([RIGHT, WRONG, WRONG, RIGHT], (1, 2), [(0, 1), (3, 2)]),
        ([WRONG, RIGHT, 99, RIGHT], (0, 2), [(1, 0), (3, 2)]),
        ([RIGHT, RIGHT], (), []),
    ],
    ids=["the last", "the first", "a tie", "a tie of four", "three states", "alike"],
)
def test_the_majority_is_right_and_on_a_tie_the_lowest_rank(
    digests: list[int], differed: tuple[int, ...], transfers: list[tuple[int, int]]
) -> None:
    plan = plan_recovery([held(5, digest=digest) for digest in digests])
    assert plan.differed == differed
    assert pairs(plan) == transfers
    assert all(t.mark is Mark.BEGIN for t in plan.transfers)
    assert plan.committed == 5


def test_a_member_that_is_behind_has_no_vote() -> None:
    behind = [held(4, digest=WRONG), held(4, digest=WRONG)]
    plan = plan_recovery([held(5), held(5, digest=WRONG), *behind])
    assert plan.differed == (1,)
    assert pairs(plan) == [(0, 1), (1, 2), (2, 3)]


def test_receivers_of_one_source_and_mark_form_a_chain() -> None:
    late = in_block(held(5))
    plan = plan_recovery([late, held(6), NEWCOMER, held(6), late, NEWCOMER, NEWCOMER])
    assert marked(plan) == [
        (1, 0, Mark.COMMIT),
        (3, 2, Mark.BEGIN),
        (0, 4, Mark.COMMIT),
        (2, 5, Mark.BEGIN),
        (1, 6, Mark.BEGIN),
    ]
    assert pairs(plan_recovery([NEWCOMER] * 4)) == [(0, 1), (1, 2), (2, 3)]


def test_states_are_compared_at_the_mark_that_most_members_have() -> None:
    """The script of one member has not come to the boundary yet. The others have stepped their
    schedulers on the way there, which must not count as a difference."""
    waiting = without_begin(held(5))
    assert plan_recovery([held(5), waiting, held(5)]).differed == ()
    others = [replace(held(5), begin_digest=n) for n in (1, 2)]
    plan = plan_recovery([*others, waiting])
    assert plan.differed == ()  # alike at the commit mark, which all three have
    plan = plan_recovery([without_commit(other) for other in others])
    assert plan.differed == (1,)


def test_a_member_without_the_compared_mark_does_not_differ_and_is_no_source() -> None:
    """Its state was not compared, so it sends none while there is another source."""
    blind = without_commit(without_begin(held(5)))
    plan = plan_recovery([held(5), held(5), blind, NEWCOMER])
    assert plan.differed == ()
    assert pairs(plan) == [(0, 3)]


# ---- the mark a receiver needs


def test_a_member_whose_block_others_completed_receives_the_commit_mark() -> None:
    plan = plan_recovery([in_block(held(5)), held(6), NEWCOMER, held(5)])
    assert marked(plan) == [(1, 0, Mark.COMMIT), (1, 2, Mark.BEGIN), (2, 3, Mark.BEGIN)]
    assert plan.stranded == ()


def test_the_commit_mark_comes_from_a_member_that_has_it() -> None:
    plan = plan_recovery([in_block(held(5)), without_commit(held(6)), held(6)])
    assert marked(plan) == [(2, 0, Mark.COMMIT)]


def test_the_begin_mark_comes_from_a_member_that_has_it() -> None:
    plan = plan_recovery([NEWCOMER, without_begin(held(6)), held(6)])
    assert marked(plan) == [(2, 0, Mark.BEGIN)]


def test_a_member_that_differs_at_its_own_step_receives_the_begin_mark_even_in_its_block() -> None:
    """The member has to do the same step again, like all others."""
    plan = plan_recovery([in_block(held(6)), in_block(held(6, digest=WRONG))])
    assert marked(plan) == [(0, 1, Mark.BEGIN)]


def test_a_torn_member_in_the_block_of_the_same_step_receives_the_begin_mark() -> None:
    torn = replace(in_block(held(6)), intact=False)
    assert marked(plan_recovery([torn, in_block(held(6))])) == [(1, 0, Mark.BEGIN)]


@pytest.mark.parametrize("committed", [4, 6])
def test_a_block_that_the_right_state_has_not_completed_is_begun_again(committed: int) -> None:
    """The others have gone back to a checkpoint and have not come as far again."""
    plan = plan_recovery([in_block(held(6)), held(committed, committed_in=3)])
    assert marked(plan) == [(1, 0, Mark.BEGIN)]


def test_a_newcomer_that_was_in_no_block_receives_the_begin_mark() -> None:
    """`in_block` means nothing for a script that has never taken part."""
    plan = plan_recovery([replace(NEWCOMER, in_block=True), held(6)])
    assert marked(plan) == [(1, 0, Mark.BEGIN)]


# ---- members whose script no state fits


def test_a_member_is_stranded_if_nobody_has_the_commit_mark_that_it_needs() -> None:
    plan = plan_recovery([in_block(held(5)), without_commit(held(6)), NEWCOMER])
    assert plan.stranded == (0,)


@pytest.mark.parametrize(("runs_done", "stranded"), [(0, ()), (1, ()), (2, (0,))])
def test_a_member_is_stranded_if_it_lacks_calls_that_the_others_cannot_repeat(
    runs_done: int, stranded: tuple[int, ...]
) -> None:
    """Only the last call can be repeated."""
    ahead = replace(held(6), runs_done=runs_done, repeats=True)
    assert plan_recovery([in_block(held(5)), ahead]).stranded == stranded
    assert plan_recovery([held(5), ahead]).stranded == ()  # the member comes from a boundary


def test_a_veteran_that_must_receive_inside_a_call_is_stranded() -> None:
    calling = replace(held(5), in_run=True)
    assert plan_recovery([calling, held(6)]).stranded == (0,)
    assert plan_recovery([calling, replace(held(5), in_run=True)]).stranded == ()
