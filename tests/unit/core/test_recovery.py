"""Whose state a new group goes on from."""

from __future__ import annotations

import pytest

from elastic.core.recovery import Declaration, plan_recovery


def held(committed: int, committed_in: int = 1) -> Declaration:
    return Declaration(committed=committed, committed_in=committed_in, intact=True, signature=0)


NOTHING = Declaration(committed=0, intact=False, signature=0)
TORN = Declaration(committed=9, committed_in=9, intact=False, signature=0)


@pytest.mark.parametrize(
    ("declarations", "committed", "transfers"),
    [
        ([held(5), held(5)], 5, []),
        ([held(5), held(6)], 6, [(1, 0)]),
        ([NOTHING, held(5), held(5), NOTHING], 5, [(1, 0), (2, 3)]),
        ([NOTHING, NOTHING], None, [(0, 1)]),
        ([TORN, held(5)], 5, [(1, 0)]),
        # Step 6 was committed twice; what the later generation committed is the lineage.
        ([held(6, 1), held(6, 2)], 6, [(1, 0)]),
        ([held(9, 1), held(6, 2)], 6, [(1, 0)]),
    ],
)
def test_the_most_advanced_lineage_is_right(
    declarations: list[Declaration], committed: int | None, transfers: list[tuple[int, int]]
) -> None:
    plan = plan_recovery(declarations)
    assert plan.committed == committed
    assert [(t.source, t.target) for t in plan.transfers] == transfers
