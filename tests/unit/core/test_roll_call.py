"""A new coordinator leaves no worker out before all nodes have had time to find it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator.formation import Wait, decide
from elastic.core.coordinator.view import FormationPolicy, GroupView
from elastic.core.membership import WorkerStatus
from tests.unit.core.cluster_views import READY, TRAINING, generation, silent, status, view
from tests.unit.core.test_formation import short

POLICY = FormationPolicy(max_workers=3, agent_grace_s=30.0, roll_call_s=1.0, probe_interval_s=0.2)
TRIO = generation(3, "a0", "b0", "c0")
A, B, C = (status(w, TRAINING, 3) for w in ("a0", "b0", "c0"))
BROKEN = status("a0", READY, 3, broken=True, detail="reset")
ELECTED = 100.0


def unheard(base: GroupView, nodes: str) -> GroupView:
    """`base` where the new coordinator knows these nodes only from the one before."""
    known = silent(base, ELECTED, nodes)
    workers = {w: replace(s, expected=s.node in nodes) for w, s in known.workers.items()}
    return replace(known, workers=workers)


@pytest.mark.parametrize("members", [(A, C), (BROKEN, B, C)], ids=["a member died", "broken"])
def test_the_first_nodes_to_report_do_not_go_on_alone_before_the_roll_call_ends(
    members: tuple[WorkerStatus, ...],
) -> None:
    situation = unheard(view(TRIO, *members), "c")
    decision = decide(situation, POLICY, ELECTED + 0.1)
    assert isinstance(decision, Wait)
    assert decision.until == pytest.approx(ELECTED + 0.3)  # then it asks if the group works
    late = decide(situation, POLICY, ELECTED + 0.9)
    assert isinstance(late, Wait)
    assert late.until == ELECTED + 1.0
    assert short(decide(situation, POLICY, ELECTED + 1.0)).startswith("MEMBER_LOST [a0")


def test_a_loss_is_decided_at_once_when_all_nodes_have_reported() -> None:
    situation = unheard(view(TRIO, A, C), "")
    assert short(decide(situation, POLICY, ELECTED + 0.1)) == "MEMBER_LOST [a0 c0]"


def test_a_group_that_trains_is_left_alone_beyond_the_roll_call() -> None:
    situation = unheard(view(TRIO, A, B, C), "c")
    assert isinstance(decide(situation, POLICY, ELECTED + 29.0), Wait)
    stuck = replace(situation, stuck=True)
    assert short(decide(stuck, POLICY, ELECTED + 1.1)) == "MEMBER_LOST [a0 b0]"


def test_a_node_that_falls_silent_after_the_election_is_not_waited_for() -> None:
    situation = silent(view(TRIO, BROKEN, B, C), ELECTED + 0.1, "c")
    assert short(decide(situation, POLICY, ELECTED + 0.2)) == "MEMBER_LOST [a0 b0]"


def test_a_member_that_is_only_presumed_to_be_ready_does_not_break_up_a_group_that_trains() -> None:
    """A planned change has taken effect. The members that have reported train in the new group, so
    the others train too, although the new coordinator presumes that they have not joined yet."""
    presumed = status("c0", READY, 0)
    situation = unheard(view(TRIO, A, B, presumed), "c")
    assert isinstance(decide(situation, POLICY, ELECTED + 29.0), Wait)
    known = silent(view(TRIO, A, B, presumed), ELECTED, "c")
    assert short(decide(known, POLICY, ELECTED + 1.1)) == "MEMBER_LOST [a0 b0]"


def test_members_that_a_planned_change_drops_get_time_to_report_too() -> None:
    """A dropped member may have the only copy of a step until the members that stay receive it."""
    planned = generation(4, "a0", "b0", leave_after=7)
    ready = status("b0", READY, 3, committed=7)
    situation = replace(unheard(view(planned, ready, C), "c"), previous_group=TRIO)
    assert isinstance(decide(situation, POLICY, ELECTED + 0.1), Wait)
    assert short(decide(situation, POLICY, ELECTED + 1.1)).startswith("MEMBER_LOST")
