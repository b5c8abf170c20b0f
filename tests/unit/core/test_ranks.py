"""Ranks are dense, stable, and rank 0 has the state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.formation import assign_ranks
from tests.unit.core.cluster_views import member


@pytest.mark.parametrize(
    ("previous", "present", "holders", "expected"),
    [
        ("", "c0 a1 a0", "", "a0 a1 c0"),  # in the order of nodes and slots
        ("a0 a1 b0", "b0 a0 a1", "a0 a1 b0", "a0 a1 b0"),  # nobody moves
        ("a0 a1 b0", "b0 a0", "a0 b0", "a0 b0"),  # the last one fills the gap
        ("a0 a1 b0", "a0 b0 c0", "a0 b0", "a0 c0 b0"),  # a newcomer fills the gap
        ("a0 a1 b0", "a1 b0 c0", "a1 b0", "a1 c0 b0"),  # but no newcomer becomes rank 0
        ("a0 a1 b0 b1", "b1 c0", "b1", "b1 c0"),  # survivors before newcomers
        ("a0 a1 b0 b1 b2", "b1 b2 c0", "b1 b2", "b1 b2 c0"),
    ],
)
def test_members_keep_their_ranks(previous: str, present: str, holders: str, expected: str) -> None:
    ranks = assign_ranks(
        previous.split(), [member(w) for w in present.split()], frozenset(holders.split())
    )
    assert " ".join(m.worker for m in ranks) == expected


@given(
    previous=st.lists(st.integers(0, 9), unique=True),
    present=st.sets(st.integers(0, 9), min_size=1),
    holders=st.sets(st.integers(0, 9)),
)
def test_each_worker_has_one_rank_and_a_holder_has_rank_0_if_there_is_one(
    previous: list[int], present: set[int], holders: set[int]
) -> None:
    ranks = assign_ranks(
        [f"a{i}" for i in previous],
        [member(f"a{i}") for i in present],
        frozenset(f"a{i}" for i in holders),
    )
    assert sorted(m.slot for m in ranks) == sorted(present)
    assert ranks[0].slot in holders or not holders & present
