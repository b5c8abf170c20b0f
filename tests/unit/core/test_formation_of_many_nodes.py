"""The decisions of `decide` while nodes are out of contact or leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator.formation import Complete, Form, Wait, WaitReason, decide
from elastic.core.coordinator.view import FormationPolicy, GroupView
from elastic.core.membership import ChangeReason, WorkerStatus
from tests.unit.core.cluster_views import (
    FINISHED,
    JOINING,
    READY,
    STARTING,
    TRAINING,
    generation,
    leaving,
    silent,
    status,
    view,
)
from tests.unit.core.test_formation import short

POLICY = FormationPolicy(min_workers=1, max_workers=3, agent_grace_s=10.0, probe_interval_s=0.2)
PAIR, TRIO = generation(3, "a0", "b0"), generation(3, "a0", "b0", "c0")
A, B, C = (status(w, TRAINING, 3) for w in ("a0", "b0", "c0"))
A_BROKEN = status("a0", READY, 3, broken=True, detail="reset")
NEW = status("d0", READY)
NOBODY = generation(4)
NOW = 100.0


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (silent(view(PAIR, A, B), 95.0, "b"), WaitReason.OUT_OF_CONTACT),
        (silent(view(PAIR, A, B, stuck=True), 95.0, "b"), "MEMBER_LOST [a0]"),
        (silent(view(PAIR, A, B, stalled=True), 95.0, "b"), "MEMBER_LOST [a0]"),
        (silent(view(PAIR, A_BROKEN, B), 95.0, "b"), "MEMBER_LOST [a0]"),
        (silent(view(PAIR, replace(A, broken=True), B), 95.0, "b"), "MEMBER_LOST [a0]"),
        (silent(view(PAIR, A, B), 90.0, "b"), "MEMBER_LOST [a0]"),
        (silent(view(PAIR, status("a0", JOINING, 3), B), 95.0, "b"), "MEMBER_LOST [a0]"),
        # All of them: the coordinator is cut off, or newly elected.
        (silent(view(PAIR, A, B), -900.0, "ab"), WaitReason.OUT_OF_CONTACT),
        (silent(view(PAIR, A, B, NEW, stuck=True), -900.0, "ab"), WaitReason.OUT_OF_CONTACT),
        # Newcomers wait until it is known which members are there.
        (silent(view(PAIR, A, B, NEW, newcomers_since=0.0), 95.0, "b"), WaitReason.OUT_OF_CONTACT),
        # Newcomers out of contact do not count.
        (silent(view(PAIR, A, B, NEW), 0.0, "d"), WaitReason.STEADY),
        # The others go on at once when one is certainly lost; silent ones cannot be told.
        (silent(view(TRIO, A, B), 99.0, "b"), "MEMBER_LOST [a0]"),
        # A finished member needs no group, so b0 gets its grace.
        (silent(view(PAIR, status("a0", FINISHED, 3), B), 95.0, "b"), WaitReason.OUT_OF_CONTACT),
    ],
)
def test_a_working_group_waits_for_silent_members(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, NOW)) == expected


@pytest.mark.parametrize(
    ("last_known", "trained_in", "expected"),
    [
        (status("b0", JOINING, 3), 2, WaitReason.OUT_OF_CONTACT),
        (status("b0", READY, 0, acknowledged=2), 2, WaitReason.OUT_OF_CONTACT),  # may know of 3 now
        (status("b0", READY, 2, acknowledged=3), 2, WaitReason.OUT_OF_CONTACT),  # about to join
        (status("b0", STARTING), 2, "MEMBER_LOST [d0]"),
        (status("b0", JOINING, 3), 0, "MEMBER_LOST [d0]"),  # nobody had a state to give
    ],
)
def test_a_silent_newcomer_is_awaited_if_it_may_have_got_the_state(
    last_known: WorkerStatus, trained_in: int, expected: object
) -> None:
    last_known = replace(last_known, has_state=False)
    situation = silent(view(PAIR, last_known, NEW, trained_in=trained_in), 95.0, "b")
    assert short(decide(situation, POLICY, NOW)) == expected


@pytest.mark.parametrize(
    ("since", "expected"), [(95.0, WaitReason.OUT_OF_CONTACT), (90.0, "MEMBER_LOST [c0 d0]")]
)
def test_a_member_left_behind_is_awaited_if_it_may_be_the_last_holder_of_the_state(
    since: float, expected: object
) -> None:
    """a0 is lost before the newcomer c0 has received the state, which only a0 and b0 had."""
    coming = status("c0", READY, 3, broken=True, has_state=False)
    situation = silent(view(generation(3, "a0", "c0"), coming, B, NEW), since, "b")
    b0 = replace(situation.workers["b0"], left_behind=True)
    situation = replace(situation, workers={**situation.workers, "b0": b0})
    assert short(decide(situation, POLICY, NOW)) == expected


def test_a_wait_for_silent_members_lasts_until_the_next_probe_or_the_end_of_the_grace() -> None:
    def until(since: float) -> float | None:
        decision = decide(silent(view(PAIR, A, B), since, "b"), POLICY, NOW)
        assert isinstance(decision, Wait)
        return decision.until

    assert until(95.0) == NOW + 0.2
    assert until(90.1) == 90.1 + 10.0
    everybody = decide(silent(view(PAIR, A, B), 0.0, "ab"), POLICY, NOW)
    assert everybody == Wait(reason=WaitReason.OUT_OF_CONTACT)


def test_the_grace_of_several_silent_nodes_counts_from_the_first_one() -> None:
    both = silent(view(TRIO, A, B, C), 95.0, "bc")
    workers = {**both.workers, "b0": replace(both.workers["b0"], out_of_contact_since=90.0)}
    decision = decide(replace(both, workers=workers), POLICY, NOW)
    assert short(decision) == "MEMBER_LOST [a0]"


@pytest.mark.parametrize(
    ("situation", "policy", "expected"),
    [
        (leaving(view(PAIR, A, B), "a"), {}, "MEMBER_LEAVING planned [b0]"),
        (leaving(view(TRIO, A, B, C), "a", "c"), {}, "MEMBER_LEAVING planned [b0]"),
        # Newcomers take the places of leaving members at once, and no more than there are.
        (leaving(view(PAIR, A, B, NEW), "a"), {}, "MEMBER_LEAVING planned [b0 d0]"),
        (
            leaving(view(PAIR, A, B, NEW, status("e0", READY)), "a"),
            {"max_workers": 2},
            "MEMBER_LEAVING planned [b0 d0]",
        ),
        # A newcomer on a node that leaves does not count.
        (leaving(view(PAIR, A, B, NEW), "d"), {}, WaitReason.STEADY),
        (leaving(view(PAIR, A, B, NEW), "a", "d"), {}, "MEMBER_LEAVING planned [b0]"),
        # Only those that leave hold the state: one of them stays until another has it.
        (leaving(view(PAIR, A, B), "a", "b"), {}, WaitReason.STEADY),
        (leaving(view(PAIR, A, B, NEW), "a", "b"), {}, "MEMBER_LEAVING planned [b0 d0]"),
        (
            leaving(view(PAIR, A, B, NEW, status("e0", READY)), "a", "b"),
            {"max_workers": 2},
            "MEMBER_LEAVING planned [b0 d0]",
        ),
        # Too few are left: nobody trains.
        (leaving(view(PAIR, A, B), "a"), {"min_workers": 2}, "MEMBER_LEAVING planned []"),
        (
            leaving(view(PAIR, A, B, NEW), "a"),
            {"min_workers": 2},
            "MEMBER_LEAVING planned [b0 d0]",
        ),
        # One has finished already, and counts.
        (
            leaving(view(TRIO, A, B, status("c0", FINISHED, 3)), "a"),
            {"min_workers": 2},
            "MEMBER_LEAVING planned [b0]",
        ),
        # Members on their way in arrive first.
        (
            leaving(view(PAIR, A, status("b0", JOINING, 3), assembling_since=99.0), "a"),
            {},
            WaitReason.ASSEMBLING,
        ),
        # An unplanned change takes leaving members along: one may have got further than the rest.
        (leaving(view(TRIO, A, B), "a"), {}, "MEMBER_LOST [a0 b0]"),
        (leaving(view(TRIO, A, B), "a", "b"), {}, "MEMBER_LOST [a0 b0]"),
    ],
)
def test_members_of_leaving_nodes_are_dropped_by_a_planned_change(
    situation: GroupView, policy: dict[str, int], expected: object
) -> None:
    decision = decide(situation, replace(POLICY, **policy), NOW)  # type: ignore[arg-type]
    assert short(decision) == expected


def test_a_group_of_one_that_leaves_is_first_joined_by_its_successor() -> None:
    situation = leaving(view(generation(3, "a0"), A, NEW), "a")
    decision = decide(situation, replace(POLICY, max_workers=1), NOW)
    assert short(decision) == "MEMBER_LEAVING planned [a0 d0]"


A_OUT, B_OUT = status("a0", READY, 3), status("b0", READY, 3)


@pytest.mark.parametrize(
    ("situation", "min_workers", "expected"),
    [
        # Leaving workers that have got further than the others hand over their state.
        (leaving(view(NOBODY, A_OUT, B_OUT), "a"), 1, "STARTED [b0]"),
        (leaving(view(NOBODY, replace(A_OUT, committed=1), B_OUT), "a"), 1, "STARTED [a0 b0]"),
        (leaving(view(NOBODY, A_OUT, NEW), "a"), 1, "STARTED [a0 d0]"),
        (leaving(view(NOBODY, status("a0", READY), B_OUT), "a"), 1, "STARTED [b0]"),
        # Leaving workers do not count towards the minimum.
        (leaving(view(NOBODY, A_OUT, B_OUT), "a"), 2, WaitReason.BELOW_MINIMUM),
        (leaving(view(NOBODY, A_OUT), "a"), 1, WaitReason.BELOW_MINIMUM),
        (
            leaving(view(NOBODY, A_OUT, status("b0", STARTING), enough_since=0.0), "a"),
            1,
            WaitReason.BELOW_MINIMUM,
        ),
        # A group does not wait for a leaving worker that still starts.
        (
            leaving(view(NOBODY, status("a0", STARTING), B_OUT), "a"),
            1,
            "STARTED [b0]",
        ),
        # But the group that they train in must end first, also out of contact.
        (leaving(view(NOBODY, A, B_OUT, formed_at=99.0), "a"), 1, WaitReason.ASSEMBLING),
        (
            silent(view(NOBODY, A, B_OUT, formed_at=99.0), 95.0, "a"),
            1,
            WaitReason.ASSEMBLING,
        ),
        (silent(view(NOBODY, A, B_OUT, formed_at=-900.0, slots=1), 90.0, "a"), 1, "STARTED [b0]"),
        # A job that a leaving worker has finished is complete.
        (leaving(view(NOBODY, status("a0", FINISHED, 3)), "a"), 1, Complete),
    ],
)
def test_a_new_group_includes_leaving_workers_only_to_hand_over_the_state(
    situation: GroupView, min_workers: int, expected: object
) -> None:
    decision = decide(situation, replace(POLICY, min_workers=min_workers), NOW)
    assert short(decision) == expected


def test_a_member_in_contact_goes_on_without_silent_ones_of_which_one_has_finished() -> None:
    situation = silent(view(TRIO, status("a0", FINISHED, 3), B, C), 0.0, "ab")
    decision = decide(situation, POLICY, NOW)
    assert isinstance(decision, Form)
    assert decision.reason is ChangeReason.MEMBER_LOST


@pytest.mark.parametrize(
    ("newcomer", "expected"),
    [(NEW, "MEMBER_LOST [e0 d0]"), (status("d0", READY, 3, acknowledged=4), "MEMBER_LOST [d0]")],
)
def test_a_leaving_worker_hands_over_the_state_that_only_it_has(
    newcomer: WorkerStatus, expected: object
) -> None:
    """All members of the group that went on without e0 have been given up."""
    behind = status("e0", READY, 3, acknowledged=4)
    situation = view(generation(4, "b0", "c0"), status("b0", TRAINING, 4), newcomer, behind)
    situation = silent(leaving(situation, "e"), 90.0, "b")
    assert short(decide(situation, POLICY, NOW)) == expected
    released = replace(situation, released_nodes=frozenset("e"))
    assert short(decide(released, POLICY, NOW)) == "MEMBER_LOST [d0]"


@pytest.mark.parametrize(
    ("others", "since", "expected"),
    [
        ((NEW,), 90.0, Complete),  # d0 would begin the whole job again
        ((NEW,), 95.0, WaitReason.OUT_OF_CONTACT),  # b0 may still complete the last step
        ((NEW, status("c0", JOINING, 3, committed=8)), 90.0, "MEMBER_LOST [c0]"),
        ((NEW, status("c0", JOINING, 3, committed=2)), 90.0, Complete),
    ],
)
def test_a_job_is_complete_once_the_silent_members_on_its_last_step_are_given_up(
    others: tuple[WorkerStatus, ...], since: float, expected: object
) -> None:
    done = status("a0", FINISHED, 3, committed=9)
    situation = silent(view(TRIO, done, B, *others, slots=4), since, "b")
    decision = decide(situation, POLICY, NOW)
    assert short(decision) == expected


def test_a_member_back_in_contact_while_it_joins_gets_time_to_arrive() -> None:
    alone = generation(4, "a0")
    back = status("a0", JOINING, 4, has_state=False)
    newcomers = [status(w, READY) for w in ("b0", "c0")]
    situation = view(alone, back, *newcomers, assembling_since=0.0)
    here = replace(situation.workers["a0"], in_contact_since=400.0)
    situation = replace(situation, workers={**situation.workers, "a0": here})
    policy = replace(POLICY, busy_timeout_s=50.0, first_step_s=50.0, max_workers=2)
    assert short(decide(situation, policy, 401.0)) == WaitReason.ASSEMBLING
    assert short(decide(situation, policy, 451.0)) != WaitReason.ASSEMBLING
