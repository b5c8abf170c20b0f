"""What is decided while nodes are out of contact, or leave."""

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
        # Newcomers wait until it is known who is there.
        (silent(view(PAIR, A, B, NEW, newcomers_since=0.0), 95.0, "b"), WaitReason.OUT_OF_CONTACT),
        # Newcomers out of contact are none.
        (silent(view(PAIR, A, B, NEW), 0.0, "d"), WaitReason.STEADY),
        # The others go on at once when one is lost for certain; the silent cannot be told.
        (silent(view(TRIO, A, B), 99.0, "b"), "MEMBER_LOST [a0]"),
        # One that has finished is waited for by nobody.
        (silent(view(PAIR, status("a0", FINISHED, 3), B), 95.0, "b"), WaitReason.OUT_OF_CONTACT),
    ],
)
def test_out_of_contact(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, NOW)) == expected


@pytest.mark.parametrize(
    ("last_known", "trained_in", "expected"),
    [
        (status("b0", JOINING, 3), 2, WaitReason.OUT_OF_CONTACT),
        (status("b0", READY, 0, acknowledged=2), 2, WaitReason.OUT_OF_CONTACT),  # heard of it since
        (status("b0", READY, 2, acknowledged=3), 2, WaitReason.OUT_OF_CONTACT),  # about to join
        (status("b0", STARTING), 2, "MEMBER_LOST [d0]"),
        (status("b0", JOINING, 3), 0, "MEMBER_LOST [d0]"),  # nobody had a state to give
    ],
)
def test_a_silent_newcomer_may_have_got_the_state(
    last_known: WorkerStatus, trained_in: int, expected: object
) -> None:
    last_known = replace(last_known, has_state=False)
    situation = silent(view(PAIR, last_known, NEW, trained_in=trained_in), 95.0, "b")
    assert short(decide(situation, POLICY, NOW)) == expected


@pytest.mark.parametrize(
    ("since", "expected"), [(95.0, WaitReason.OUT_OF_CONTACT), (90.0, "MEMBER_LOST [c0 d0]")]
)
def test_who_was_left_behind_may_be_the_last_that_holds_the_state(
    since: float, expected: object
) -> None:
    """a0 is lost before the newcomer c0 has got what only a0 and b0 had."""
    coming = status("c0", READY, 3, broken=True, has_state=False)
    situation = silent(view(generation(3, "a0", "c0"), coming, B, NEW), since, "b")
    b0 = replace(situation.workers["b0"], left_behind=True)
    situation = replace(situation, workers={**situation.workers, "b0": b0})
    assert short(decide(situation, POLICY, NOW)) == expected


def test_the_next_look_at_the_silent_is_when_to_ask_or_to_give_up() -> None:
    def until(since: float) -> float | None:
        decision = decide(silent(view(PAIR, A, B), since, "b"), POLICY, NOW)
        assert isinstance(decision, Wait)
        return decision.until

    assert until(95.0) == NOW + 0.2
    assert until(90.1) == 90.1 + 10.0
    everybody = decide(silent(view(PAIR, A, B), 0.0, "ab"), POLICY, NOW)
    assert everybody == Wait(reason=WaitReason.OUT_OF_CONTACT)


def test_of_several_silent_nodes_the_first_one_counts() -> None:
    both = silent(view(TRIO, A, B, C), 95.0, "bc")
    workers = {**both.workers, "b0": replace(both.workers["b0"], silent_since=90.0)}
    decision = decide(replace(both, workers=workers), POLICY, NOW)
    assert short(decision) == "MEMBER_LOST [a0]"


@pytest.mark.parametrize(
    ("situation", "policy", "expected"),
    [
        (leaving(view(PAIR, A, B), "a"), {}, "MEMBER_LEAVING planned [b0]"),
        (leaving(view(TRIO, A, B, C), "a", "c"), {}, "MEMBER_LEAVING planned [b0]"),
        # Newcomers take their places at once, and no more than there are.
        (leaving(view(PAIR, A, B, NEW), "a"), {}, "MEMBER_LEAVING planned [b0 d0]"),
        (
            leaving(view(PAIR, A, B, NEW, status("e0", READY)), "a"),
            {"max_workers": 2},
            "MEMBER_LEAVING planned [b0 d0]",
        ),
        # A newcomer on a node that leaves is none.
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
        # An unplanned change takes them along: one of them may have got further than the others.
        (leaving(view(TRIO, A, B), "a"), {}, "MEMBER_LOST [a0 b0]"),
        (leaving(view(TRIO, A, B), "a", "b"), {}, "MEMBER_LOST [a0 b0]"),
    ],
)
def test_seeing_off(situation: GroupView, policy: dict[str, int], expected: object) -> None:
    decision = decide(situation, replace(POLICY, **policy), NOW)  # type: ignore[arg-type]
    assert short(decision) == expected


def test_a_group_of_one_that_leaves_gets_its_successor() -> None:
    situation = leaving(view(generation(3, "a0"), A, NEW), "a")
    decision = decide(situation, replace(POLICY, max_workers=1), NOW)
    assert short(decision) == "MEMBER_LEAVING planned [a0 d0]"


A_OUT, B_OUT = status("a0", READY, 3), status("b0", READY, 3)


@pytest.mark.parametrize(
    ("situation", "min_workers", "expected"),
    [
        # Those that have got further than the others hand over what they hold.
        (leaving(view(NOBODY, A_OUT, B_OUT), "a"), 1, "STARTED [b0]"),
        (leaving(view(NOBODY, replace(A_OUT, committed=1), B_OUT), "a"), 1, "STARTED [a0 b0]"),
        (leaving(view(NOBODY, A_OUT, NEW), "a"), 1, "STARTED [a0 d0]"),
        (leaving(view(NOBODY, status("a0", READY), B_OUT), "a"), 1, "STARTED [b0]"),
        # Those that leave are no reason to begin.
        (leaving(view(NOBODY, A_OUT, B_OUT), "a"), 2, WaitReason.BELOW_MINIMUM),
        (leaving(view(NOBODY, A_OUT), "a"), 1, WaitReason.BELOW_MINIMUM),
        (
            leaving(view(NOBODY, A_OUT, status("b0", STARTING), enough_since=0.0), "a"),
            1,
            WaitReason.BELOW_MINIMUM,
        ),
        # Nor to wait longer.
        (
            leaving(view(NOBODY, status("a0", STARTING), B_OUT), "a"),
            1,
            "STARTED [b0]",
        ),
        # But what they train in must end first, also out of contact.
        (leaving(view(NOBODY, A, B_OUT, formed_at=99.0), "a"), 1, WaitReason.ASSEMBLING),
        (
            silent(view(NOBODY, A, B_OUT, formed_at=99.0), 95.0, "a"),
            1,
            WaitReason.ASSEMBLING,
        ),
        (silent(view(NOBODY, A, B_OUT, formed_at=-900.0, slots=1), 90.0, "a"), 1, "STARTED [b0]"),
        # What they have finished is finished.
        (leaving(view(NOBODY, status("a0", FINISHED, 3)), "a"), 1, Complete),
    ],
)
def test_gathering_without_those_that_leave(
    situation: GroupView, min_workers: int, expected: object
) -> None:
    decision = decide(situation, replace(POLICY, min_workers=min_workers), NOW)
    assert short(decision) == expected


def test_silent_members_that_have_finished_are_not_all_who_are_left() -> None:
    situation = silent(view(TRIO, status("a0", FINISHED, 3), B, C), 0.0, "ab")
    decision = decide(situation, POLICY, NOW)
    assert isinstance(decision, Form)
    assert decision.reason is ChangeReason.MEMBER_LOST


@pytest.mark.parametrize(
    ("newcomer", "expected"),
    [(NEW, "MEMBER_LOST [e0 d0]"), (status("d0", READY, 3, acknowledged=4), "MEMBER_LOST [d0]")],
)
def test_who_leaves_hands_over_the_state_that_only_it_has(
    newcomer: WorkerStatus, expected: object
) -> None:
    """All members of the group that went on without it have been given up."""
    behind = status("e0", READY, 3, acknowledged=4)
    situation = view(generation(4, "b0", "c0"), status("b0", TRAINING, 4), newcomer, behind)
    situation = silent(leaving(situation, "e"), 90.0, "b")
    assert short(decide(situation, POLICY, NOW)) == expected
    let_go = replace(situation, let_go=frozenset("e"))
    assert short(decide(let_go, POLICY, NOW)) == "MEMBER_LOST [d0]"


@pytest.mark.parametrize(
    ("others", "since", "expected"),
    [
        ((NEW,), 90.0, Complete),  # it would begin the whole job again
        ((NEW,), 95.0, WaitReason.OUT_OF_CONTACT),  # the last step may be done yet
        ((NEW, status("c0", JOINING, 3, committed=8)), 90.0, "MEMBER_LOST [c0]"),
        ((NEW, status("c0", JOINING, 3, committed=2)), 90.0, Complete),
    ],
)
def test_a_job_is_done_once_those_on_their_last_step_are_given_up(
    others: tuple[WorkerStatus, ...], since: float, expected: object
) -> None:
    done = status("a0", FINISHED, 3, committed=9)
    situation = silent(view(TRIO, done, B, *others, slots=4), since, "b")
    decision = decide(situation, POLICY, NOW)
    assert short(decision) == expected


def test_who_comes_back_on_its_way_in_gets_the_time_to_arrive() -> None:
    alone = generation(4, "a0")
    back = status("a0", JOINING, 4, has_state=False)
    newcomers = [status(w, READY) for w in ("b0", "c0")]
    situation = view(alone, back, *newcomers, assembling_since=0.0)
    here = replace(situation.workers["a0"], in_contact_since=400.0)
    situation = replace(situation, workers={**situation.workers, "a0": here})
    policy = replace(POLICY, busy_timeout_s=50.0, first_step_s=50.0, max_workers=2)
    assert short(decide(situation, policy, 401.0)) == WaitReason.ASSEMBLING
    assert short(decide(situation, policy, 451.0)) != WaitReason.ASSEMBLING
