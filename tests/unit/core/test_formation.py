"""Each situation of the group, and what is decided in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator.formation import (
    Complete,
    Decision,
    Form,
    GiveUp,
    Wait,
    WaitReason,
    decide,
)
from elastic.core.coordinator.stopping import End, Stop, decide_stop
from elastic.core.coordinator.view import GroupView
from elastic.core.membership import ChangeReason, Purpose, WorkerStatus
from tests.unit.core.cluster_views import (
    FINISHED,
    JOINING,
    POLICY,
    READY,
    STARTING,
    TRAINING,
    generation,
    silent,
    status,
    view,
)

PAIR = generation(3, "a0", "b0")
PLANNED = generation(4, "a0", "b0", "c0", leave_after=9)
SAVING = generation(4, "a0", "b0", purpose=Purpose.SAVE_AND_LEAVE)
NOBODY = generation(4)
A, B = status("a0", TRAINING, 3), status("b0", TRAINING, 3)
A_JOINS = status("a0", JOINING, 3)
A_BROKEN = status("a0", READY, 3, broken=True, detail="reset")
NEW = status("c0", READY)
NEW_HEARD = status("c0", READY, acknowledged=4)
A_DONE = status("a0", FINISHED, 3, committed=8)
STOP = Stop(exit_code=143, reason="a test", deadline=30.0)


def short(decision: Decision | End) -> object:
    """Reason and members, as the tables below have them."""
    if isinstance(decision, Wait):
        return decision.reason
    if isinstance(decision, Form):
        when = " planned" if decision.planned else ""
        out = "".join(f" -{w}" for w in sorted(decision.left_out))
        members = " ".join(m.worker for m in decision.members)
        return f"{decision.reason.name}{when} [{members}]{out}"
    return decision if isinstance(decision, End) else type(decision)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(None), WaitReason.BELOW_MINIMUM),
        (view(None, NEW), WaitReason.BELOW_MINIMUM),
        (view(None, NEW, status("d0", READY)), "STARTED [c0 d0]"),
        (view(None, NEW, status("d0", READY), status("e0", STARTING)), WaitReason.GATHERING),
        (view(None, NEW, status("d0", READY), slots=3, enough_since=0.0), "STARTED [c0 d0]"),
        # A new leader that knows of no generation must not form a second group.
        (view(None, A, B, NEW, status("d0", READY)), WaitReason.STEADY),
        # Holders of the state are waited for as long as they may be busy, then ended.
        (view(NOBODY, A, NEW, status("d0", READY), formed_at=99.0), WaitReason.ASSEMBLING),
        (view(NOBODY, A, NEW, status("d0", READY), formed_at=-900.0), "JOIN_TIMED_OUT [] -a0"),
        (view(NOBODY, A_DONE, status("b0", READY, 3, committed=7)), "STARTED [b0]"),
        (view(NOBODY, A_DONE, status("b0", READY, 3, committed=4)), Complete),
        (view(NOBODY, A_DONE, NEW), Complete),
    ],
)
def test_without_a_group(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A, B), WaitReason.STEADY),
        (view(PAIR, A, B, stalled=True), "STALLED [a0 b0]"),
        (view(PAIR, A), "BELOW_MINIMUM []"),
        (view(generation(3, "a0", "b0", "c0"), A, B), "MEMBER_LOST [a0 b0]"),
        (view(PAIR, A_BROKEN, B), WaitReason.LISTENING_FOR_A_DEATH),
        (view(PAIR, A_BROKEN, B, broken_since=99.0), "GROUP_BROKEN [a0 b0]"),
        (view(PAIR, A_BROKEN, B, broken_since=99.0, fruitless_breaks=2), "GROUP_BROKEN [a0 b0]"),
        (
            view(PAIR, A_BROKEN, B, broken_since=99.0, fruitless_breaks=3),
            WaitReason.LISTENING_FOR_A_DEATH,
        ),
        (view(PAIR, A_BROKEN, B, fruitless_breaks=5), GiveUp),
        (view(PAIR, A, B, NEW), WaitReason.COLLECTING_NEWCOMERS),
        (view(PAIR, A, B, NEW, newcomers_since=99.0), "MEMBER_JOINED planned [a0 b0 c0]"),
        # Nobody with the state is left in the group: one that came back is taken in at once.
        (
            view(generation(3, "a0", "c0"), NEW, status("b0", READY, 2)),
            "MEMBER_LOST [b0 c0]",
        ),
    ],
)
def test_with_a_group(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A, status("b0", JOINING, 3), assembling_since=99.0), WaitReason.ASSEMBLING),
        # Deaf: has not even acknowledged. Busy: has, and may take its time, but not for ever.
        (view(PAIR, A_JOINS, status("b0", TRAINING, 2)), "BELOW_MINIMUM [] -b0"),
        # Or its reports are late: another would not train if it had not come.
        (view(PAIR, A, status("b0", TRAINING, 2), assembling_since=0.0), WaitReason.ASSEMBLING),
        (
            view(PAIR, A, status("b0", TRAINING, 2, acknowledged=3), assembling_since=0.0),
            WaitReason.ASSEMBLING,
        ),
        (
            view(PAIR, A, status("b0", TRAINING, 2, acknowledged=3), assembling_since=-900.0),
            "BELOW_MINIMUM [] -b0",
        ),
        # Before a planned change takes effect nobody is late ...
        (
            view(
                PLANNED,
                *(status(w, TRAINING, 3, acknowledged=4) for w in ("a0", "b0")),
                status("c0", READY, acknowledged=4),
            ),
            WaitReason.ASSEMBLING,
        ),
        # ... and if it never does, one of the members holds up the others.
        (
            view(
                PLANNED,
                *(status(w, TRAINING, 3, acknowledged=4) for w in ("a0", "b0")),
                status("c0", JOINING, 4, has_state=False),
                assembling_since=-900.0,
            ),
            "STALLED [a0 b0 c0]",
        ),
    ],
)
def test_on_the_way_in(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A_DONE, B), WaitReason.STEADY),
        (view(PAIR, A_DONE), Complete),
        (view(PAIR, A_DONE, status("b0", READY, 3, broken=True, committed=7)), "MEMBER_LOST [b0]"),
        # It would wait in generation 4 for one that needs no group any more.
        (view(SAVING, A_DONE, status("b0", JOINING, 4, committed=7)), "MEMBER_LOST [b0]"),
        # A newcomer has nothing to do in a job that others have finished.
        (view(PLANNED, A_DONE, A_DONE, status("c0", JOINING, 4, has_state=False)), Complete),
        # Members that had finished come back to a group that is to begin anew; or has begun to.
        (view(generation(4, "c0"), A_DONE, status("c0", READY)), Complete),
        (view(generation(4, "c0"), A_DONE, status("c0", TRAINING, 4)), WaitReason.STEADY),
    ],
)
def test_towards_the_end(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "now", "expected"),
    [
        (view(None), 0.0, End(in_time=True)),
        (view(NOBODY, NEW), 0.0, WaitReason.ASSEMBLING),  # it may have been a member
        (view(NOBODY, NEW), 10.0, End(in_time=True)),
        (view(NOBODY, NEW_HEARD), 0.0, End(in_time=True)),
        (view(NOBODY, status("a0", JOINING, 3, has_state=False)), 9.0, WaitReason.ASSEMBLING),
        (view(NOBODY, status("a0", JOINING, 3, has_state=False)), 10.0, End(in_time=True)),
        (view(NOBODY, status("a0", READY, 3), adopted_at=0.0), 9.0, WaitReason.ASSEMBLING),
        (view(NOBODY, adopted_at=0.0), 9.0, WaitReason.ASSEMBLING),
        (view(NOBODY, adopted_at=0.0), 10.0, End(in_time=True)),
        (view(NOBODY, status("a0", READY, 3), NEW_HEARD), 0.0, "STOPPING [a0]"),
        (view(NOBODY, status("a0", READY, 3), B), 0.0, WaitReason.ASSEMBLING),
        (view(NOBODY, status("a0", READY, 3), B), 20.0, "STOPPING [a0]"),
        (view(PAIR, A, B, NEW), 0.0, "STOPPING planned [a0 b0]"),
        (view(PAIR, A, status("b0", JOINING, 3)), 0.0, "STOPPING [a0 b0]"),
        (view(PAIR, A, B), 30.0, End(in_time=False)),
        (view(SAVING, status("a0", TRAINING, 4)), 0.0, "MEMBER_LOST [a0]"),
        (
            view(SAVING, status("a0", TRAINING, 4), status("b0", TRAINING, 4), NEW),
            0.0,
            WaitReason.STEADY,
        ),
        (view(SAVING, A_DONE, status("b0", FINISHED, 4), NEW), 0.0, Complete),
    ],
)
def test_while_stopping(situation: GroupView, now: float, expected: object) -> None:
    assert short(decide_stop(situation, POLICY, STOP, now)) == expected


@pytest.mark.parametrize(
    ("b_held", "now", "expected"),
    [
        (6, 10.0, "JOIN_TIMED_OUT [b0] -a0"),  # the other saves as much
        (5, 10.0, WaitReason.ASSEMBLING),  # only a0 has the last step, and may be evaluating
        (5, 20.0, "JOIN_TIMED_OUT [b0] -a0"),  # the rest of the grace is for the save
    ],
)
def test_while_stopping_a_late_member_gets_the_grace_if_only_it_has_the_last_step(
    b_held: int, now: float, expected: object
) -> None:
    late = status("a0", TRAINING, 3, acknowledged=4, committed=6)
    situation = view(SAVING, late, status("b0", JOINING, 4, committed=b_held), assembling_since=0.0)
    assert short(decide_stop(situation, POLICY, STOP, now)) == expected


def test_while_stopping_a_late_member_is_hurried_if_one_that_is_back_has_as_many_steps() -> None:
    late, back = (
        status("a0", TRAINING, 3, acknowledged=4, committed=6),
        status("c0", READY, 3, committed=6),
    )
    situation = view(generation(4, "a0", purpose=Purpose.SAVE_AND_LEAVE), late, back)
    decision = decide_stop(replace(situation, assembling_since=0.0), POLICY, STOP, 10.0)
    assert short(decision) == "BELOW_MINIMUM [c0] -a0"


def test_while_stopping_who_has_not_left_an_earlier_group_saves_the_step_that_only_it_has() -> None:
    evaluates = status("d0", TRAINING, 2, committed=6)
    alone = view(SAVING, evaluates, status("c0", READY, 1, committed=4), trained_in=2)
    assert short(decide_stop(alone, POLICY, STOP, 0.0)) == "STOPPING [c0 d0]"
    member = status("b0", JOINING, 4, committed=4)
    beside_one = view(SAVING, evaluates, member, trained_in=2)
    assert short(decide_stop(beside_one, POLICY, STOP, 0.0)) == "MEMBER_LOST [b0 d0]"


@pytest.mark.parametrize(
    ("trained_in", "expected"),
    [
        (3, "STOPPING [a0 b0 c0]"),
        (2, "STOPPING [a0 b0]"),  # a group that trained later went on without it
    ],
)
def test_a_new_leader_has_who_is_back_with_the_last_step_save_with_those_that_were_saving(
    trained_in: int, expected: str
) -> None:
    """A group that saves adds no step, and is no later than the groups that trained."""
    saving = [status(name, TRAINING, 4, committed=2, trained_in=3) for name in ("a0", "b0")]
    back = status("c0", READY, 3, committed=6, trained_in=trained_in)
    situation = view(SAVING, *saving, back, trained_in=4, adopted_at=0.0)
    assert short(decide_stop(situation, POLICY, STOP, 1.0)) == expected


def test_the_next_look_is_when_patience_ends() -> None:
    late = status("b0", TRAINING, 2, acknowledged=3)
    decision = decide(view(PAIR, A, late, assembling_since=50.0), POLICY, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=50.0 + POLICY.busy_timeout_s)
    stalled = generation(3, "a0", "b0", reason=ChangeReason.STALLED)
    decision = decide(view(stalled, A, late, assembling_since=95.0), POLICY, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=95.0 + POLICY.join_timeout_s)


def test_members_in_a_slow_step_may_come_later_unless_it_has_stalled() -> None:
    policy = replace(POLICY, first_step_s=1000.0)
    late = status("b0", TRAINING, 2, acknowledged=3)
    decision = decide(view(PAIR, A, late, assembling_since=50.0, slow=True), policy, 500.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=1050.0)
    assert isinstance(
        decide(view(PAIR, A, late, assembling_since=50.0, slow=True), policy, 1050.0), Form
    )
    assert isinstance(decide(view(PAIR, A, late, assembling_since=-950.0), policy, 50.0), Form)
    impatient = replace(POLICY, first_step_s=1.0)  # no less than any busy one
    decision = decide(view(PAIR, A, late, assembling_since=50.0, slow=True), impatient, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=50.0 + POLICY.busy_timeout_s)
    stalled = generation(3, "a0", "b0", reason=ChangeReason.STALLED)
    decision = decide(view(stalled, A, late, assembling_since=95.0, slow=True), policy, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=95.0 + POLICY.join_timeout_s)


def test_members_may_still_come_when_a_slow_step_is_over() -> None:
    late = status("b0", TRAINING, 2, acknowledged=3)
    found = view(PAIR, A, late, assembling_since=50.0, slow_at=600.0)
    decision = decide(found, POLICY, 600.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=600.0 + POLICY.busy_timeout_s)


def test_holders_of_the_state_that_compile_are_waited_for_when_the_group_is_dissolved() -> None:
    policy = replace(POLICY, first_step_s=1000.0)
    dissolved = view(
        generation(3), status("a0", TRAINING, 2, acknowledged=3), formed_at=50.0, slow=True
    )
    assert decide(dissolved, policy, 1049.0) == Wait(reason=WaitReason.ASSEMBLING, until=1050.0)
    assert isinstance(decide(dissolved, policy, 1050.0), Form)


# ---- scripts written for torchrun: any change restarts all

WHOLE = replace(POLICY, restart_all=True)
C = status("c0", READY)
D = status("d0", READY)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(None), WaitReason.BELOW_MINIMUM),
        (view(None, C), WaitReason.BELOW_MINIMUM),
        (view(None, D, C), "STARTED [c0 d0]"),
        (view(None, C, D, status("e0", STARTING)), WaitReason.GATHERING),
        (view(None, C, D, slots=3, enough_since=71.0), WaitReason.GATHERING),
        (view(None, C, D, slots=3, enough_since=70.0), "STARTED [c0 d0]"),
        # A new leader that knows of no generation: they train.
        (view(None, A, B, C, D), WaitReason.ENDING_THE_LAST_GROUP),
        # Nobody starts beside one that has run, or may have begun without having said so.
        (view(NOBODY, A, C, D), WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, A_DONE, C, D), WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, C, D, spent=frozenset({"c0"})), WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, C, D, spent=frozenset({"a0", "b0"})), "STARTED [c0 d0]"),
        # After a restart the nodes are there, and others are waited for less long.
        (view(NOBODY, C, D, slots=3, enough_since=96.0), WaitReason.GATHERING),
        (view(NOBODY, C, D, slots=3, enough_since=95.0), "STARTED [c0 d0]"),
    ],
)
def test_without_a_group_of_classic_scripts(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, WHOLE, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A, B), WaitReason.STEADY),
        (view(PAIR, A, B, stalled=True), WaitReason.STEADY),
        (view(PAIR, A), "MEMBER_LOST []"),
        (view(PAIR, A, C, D), "MEMBER_LOST []"),
        # One that is done waits for the others; if one of these is lost, it starts again, too.
        (view(PAIR, A_DONE, B), WaitReason.STEADY),
        (view(PAIR, A_DONE), "MEMBER_LOST []"),
        (view(PAIR, A_DONE, status("b0", FINISHED, 3)), Complete),
        (view(PAIR, A, status("b0", READY), formed_at=91.0), WaitReason.ASSEMBLING),
        (view(PAIR, A, status("b0", READY), formed_at=90.0), "JOIN_TIMED_OUT [] -b0"),
        (view(PAIR, A, B, C, newcomers_since=99.5), WaitReason.COLLECTING_NEWCOMERS),
        (view(PAIR, A, B, C, newcomers_since=99.0), "MEMBER_JOINED []"),
        (view(PAIR, A, B, C, newcomers_since=9.0, formed_at=99.5), WaitReason.COLLECTING_NEWCOMERS),
        (view(PAIR, A_DONE, B, C, newcomers_since=9.0), WaitReason.STEADY),
        (
            view(generation(3, "a0", "b0", "e0", "f0"), A, B, C, newcomers_since=9.0),
            "MEMBER_LOST []",
        ),
    ],
)
def test_with_a_group_of_classic_scripts(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, WHOLE, 100.0)) == expected


def test_a_full_group_of_classic_scripts_is_not_restarted_for_newcomers() -> None:
    situation = view(PAIR, A, B, C, newcomers_since=9.0)
    assert short(decide(situation, replace(WHOLE, max_workers=2), 100.0)) is WaitReason.STEADY


def test_classic_scripts_on_a_node_that_leaves_end_with_all_others() -> None:
    situation = view(PAIR, A, B)
    leaving = replace(situation.workers["b0"], leaving=True)
    situation = replace(situation, workers={**situation.workers, "b0": leaving})
    assert short(decide(situation, WHOLE, 100.0)) == "MEMBER_LEAVING []"


@pytest.mark.parametrize(
    ("silent", "since", "expected"),
    [
        ("b0", 95.0, WaitReason.OUT_OF_CONTACT),
        ("b0", 90.0, "MEMBER_LOST []"),
        ("a0 b0", 0.0, WaitReason.OUT_OF_CONTACT),
    ],
)
def test_classic_scripts_out_of_contact(silent: str, since: float, expected: object) -> None:
    situation = view(PAIR, A, B)
    workers = {
        name: replace(w, silent_since=since) if name in silent.split() else w
        for name, w in situation.workers.items()
    }
    policy = replace(WHOLE, agent_grace_s=10.0)
    assert short(decide(replace(situation, workers=workers), policy, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "now", "expected"),
    [
        (view(None, C, D), 0.0, End(in_time=True)),
        (view(PAIR, A, B), 0.0, "STOPPING []"),
        (view(NOBODY, A, C), 0.0, WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, C), 0.0, End(in_time=True)),
        (view(NOBODY, A), 30.0, End(in_time=False)),
        (view(PAIR, A, B), 30.0, End(in_time=False)),
        (view(PAIR, A_DONE, status("b0", FINISHED, 3)), 0.0, Complete),
    ],
)
def test_while_classic_scripts_stop(situation: GroupView, now: float, expected: object) -> None:
    assert short(decide_stop(situation, WHOLE, STOP, now)) == expected


def test_members_inside_a_call_go_on_without_newcomers() -> None:
    inside = [status(w, READY, 3, broken=True, in_run=True) for w in ("a0", "b0")]
    newcomer = status("c0", READY, 3, has_state=False)
    group = generation(3, "a0", "b0", "c0", "d0")
    assert short(decide(view(group, *inside, newcomer), POLICY, 100.0)) == "MEMBER_LOST [a0 b0]"


def test_a_member_that_a_planned_change_drops_is_lost_before_it_takes_place() -> None:
    waiting = [status(w, TRAINING, 3) for w in ("a0", "b0")]
    planned, before = generation(4, "a0", "b0", leave_after=9), generation(3, "a0", "b0", "c0")
    situation = view(planned, *waiting, leaving=before)
    assert short(decide(situation, POLICY, 100.0)) == "MEMBER_LOST [a0 b0]"


def test_a_dropped_member_is_lost_also_when_newcomers_wait_in_the_planned_group() -> None:
    waiting = [status("a0", TRAINING, 3), status("d0", JOINING, 4, has_state=False)]
    planned, before = generation(4, "a0", "d0", leave_after=9), generation(3, "a0", "c0")
    situation = view(planned, *waiting, leaving=before)
    assert short(decide(situation, POLICY, 100.0)) == "MEMBER_LOST [a0 d0]"


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        # It may have completed the last step of the group before, or still be about to.
        (status("c0", READY, 3, acknowledged=4, committed=10), "MEMBER_LOST [a0 c0]"),
        (status("c0", TRAINING, 3, acknowledged=4, committed=9), "MEMBER_LOST [a0 c0]"),
        # It has left, and the others went on from where it was.
        (status("c0", READY, 3, acknowledged=4, committed=9), "MEMBER_LOST [a0]"),
    ],
)
def test_who_was_dropped_is_asked_once_more_only_for_what_no_other_has(
    dropped: WorkerStatus, expected: str
) -> None:
    planned, before = generation(4, "a0", "b0", leave_after=9), generation(3, "a0", "b0", "c0")
    here = status("a0", TRAINING, 4, committed=9)
    situation = view(planned, here, dropped, leaving=before)
    assert short(decide(situation, replace(POLICY, min_workers=1), 100.0)) == expected


def test_newcomers_make_room_for_those_that_were_dropped_and_hold_the_state() -> None:
    planned = generation(4, "c0", "d0", "e0", leave_after=9)
    new = [status(w, READY, has_state=False) for w in ("d0", "e0")]
    dropped = [
        status("a0", READY, 3, acknowledged=4, committed=9),
        status("b0", READY, 3, acknowledged=4),
    ]
    before = generation(3, "a0", "b0", "c0")
    situation = view(planned, *new, *dropped, leaving=before)
    policy = replace(POLICY, max_workers=3)
    assert short(decide(situation, policy, 100.0)) == "MEMBER_LOST [a0 b0 d0]"


def test_a_leader_that_allows_fewer_members_has_the_last_ranks_wait() -> None:
    situation = view(generation(3, "a0", "b0", "c0"), A, B, status("c0", TRAINING, 3, committed=5))
    fewer = replace(POLICY, max_workers=2)
    assert short(decide(situation, fewer, 100.0)) == "MEMBER_LEAVING planned [a0 b0]"
    saves = replace(generation(3, "a0", "b0", "c0"), purpose=Purpose.SAVE_AND_LEAVE)
    assert short(decide(replace(situation, current=saves), fewer, 100.0)) is WaitReason.STEADY


def test_one_that_is_back_in_its_old_group_with_more_steps_is_taken_along() -> None:
    behind = status("a0", JOINING, 5, committed=10)
    ahead = status("c0", TRAINING, 3, committed=22)
    situation = view(generation(5, "a0", "b0"), behind, ahead, trained_in=3)
    assert short(decide(situation, POLICY, 100.0)) == "MEMBER_LOST [a0 c0]"
    went_on = replace(situation, trained_in=4)  # others went on without it
    assert short(decide(went_on, POLICY, 100.0)) == "BELOW_MINIMUM []"


def test_newcomers_make_room_for_members_that_may_hold_the_state_by_now() -> None:
    on_their_way = [status(w, JOINING, 3, has_state=False) for w in ("c0", "d0")]
    new = [status(w, READY) for w in ("a0", "b0")]
    situation = view(generation(3, "c0", "d0", "e0"), *on_their_way, *new)
    policy = replace(POLICY, max_workers=3)
    assert short(decide(situation, policy, 100.0)) == "MEMBER_LOST [c0 d0 a0]"


def test_a_member_is_lost_while_its_group_comes_to_a_planned_end() -> None:
    waiting = [status(w, TRAINING, 3) for w in ("a0", "b0")]
    ends, before = generation(4, leave_after=9), generation(3, "a0", "b0", "c0")
    assert short(decide(view(ends, *waiting, leaving=before), POLICY, 100.0)) == "MEMBER_LOST []"


def test_a_member_that_a_new_agent_has_not_heard_of_is_in_no_new_group() -> None:
    unheard = status("b0", STARTING, slot=None, endpoint="")
    situation = view(generation(3, "a0", "b0", "c0"), status("a0", TRAINING, 3), unheard)
    policy = replace(POLICY, min_workers=1)
    assert short(decide(situation, policy, 100.0)) == "MEMBER_LOST [a0]"
    stop = Stop(exit_code=143, reason="a test", deadline=130.0)
    assert short(decide_stop(situation, policy, stop, 100.0)) == "STOPPING [a0]"


@pytest.mark.parametrize(
    ("trained_in", "expected"),
    # The others have got no further than the group before; or have gone on without it.
    [(3, "JOIN_TIMED_OUT [b0 c0] -a0"), (4, "JOIN_TIMED_OUT [b0] -a0")],
)
def test_who_came_back_with_the_last_step_is_taken_along(trained_in: int, expected: str) -> None:
    stuck = status("a0", READY, 3, acknowledged=4, committed=9)
    waits = status("b0", JOINING, 4, committed=8)
    back = status("c0", READY, 3, acknowledged=4, committed=9)
    group = generation(4, "a0", "b0")
    situation = view(group, stuck, waits, back, assembling_since=0.0, trained_in=trained_in)
    policy = replace(POLICY, min_workers=1, busy_timeout_s=50.0)
    assert short(decide(situation, policy, 100.0)) == expected


def test_nobody_begins_anew_while_one_comes_out_of_a_group_where_it_may_have_got_the_state() -> (
    None
):
    comes_out = status("b0", JOINING, 3, acknowledged=4, has_state=False)
    newcomer = status("d0", READY, has_state=False)
    situation = view(generation(4, "c0"), comes_out, newcomer, trained_in=2, formed_at=100.0)
    policy = replace(POLICY, min_workers=1)
    assert short(decide(situation, policy, 109.0)) == WaitReason.OUT_OF_CONTACT
    assert short(decide(situation, policy, 110.0)) == "MEMBER_LOST [d0]"  # it is stuck there
    first = replace(situation, trained_in=0)  # there is no state yet
    assert short(decide(first, policy, 109.0)) == "MEMBER_LOST [d0]"


@pytest.mark.parametrize(
    ("members_trained_in", "expected"),
    [
        (1, "MEMBER_LOST [a0 c0]"),  # a later group of others trained too, and all of it is lost
        (3, "MEMBER_LOST [a0]"),  # the members' group went on without it
        (0, "MEMBER_LOST [a0]"),  # not known: an earlier version of elastic
    ],
)
def test_who_came_back_with_more_steps_is_judged_by_where_the_members_have_trained(
    members_trained_in: int, expected: str
) -> None:
    member = status("a0", JOINING, 5, committed=6, trained_in=members_trained_in)
    back = status("c0", READY, 2, acknowledged=5, committed=9, trained_in=2)
    situation = view(generation(5, "a0", "b0"), member, back, trained_in=3)
    assert short(decide(situation, replace(POLICY, min_workers=1), 100.0)) == expected


@pytest.mark.parametrize(
    ("trained_in", "expected"),
    [(2, Complete), (3, "STARTED [c0]"), (0, "STARTED [c0]")],
)
def test_a_job_is_done_where_only_steps_are_left_that_it_had_to_go_back_from(
    trained_in: int, expected: object
) -> None:
    done = status("a0", FINISHED, 3, committed=6, trained_in=3)
    back = status("c0", READY, 2, acknowledged=4, committed=7, trained_in=trained_in)
    situation = view(NOBODY, done, back, enough_since=0.0)
    assert short(decide(situation, POLICY, 100.0)) == expected


def test_members_out_of_contact_are_not_waited_for_for_ever_where_others_have_finished() -> None:
    """Who has finished is in contact, so it is not the coordinator that is cut off."""
    gone = silent(view(PAIR, A_DONE, B), since=90.0, nodes="b")
    patient = replace(POLICY, agent_grace_s=20.0)
    assert short(decide(gone, patient, 100.0)) is WaitReason.OUT_OF_CONTACT
    assert short(decide(gone, patient, 111.0)) is Complete
    everybody = silent(view(PAIR, A, B), since=90.0, nodes="ab")
    assert short(decide(everybody, patient, 111.0)) is WaitReason.OUT_OF_CONTACT


def test_who_comes_back_with_the_state_is_taken_in_before_others_begin_without_it() -> None:
    """It has not heard yet that it was left out, and trains for all that it knows."""
    begun = view(
        generation(5, "c0"),
        status("c0", READY),
        status("a0", TRAINING, 3, committed=28),
        formed_at=99.0,
        untold=True,
        trained_in=3,
    )
    policy = replace(POLICY, min_workers=1)
    assert short(decide(begun, policy, 100.0)) == "STARTED [a0 c0]"
    told = replace(begun, untold=False)
    assert short(decide(told, policy, 100.0)) is WaitReason.ASSEMBLING
