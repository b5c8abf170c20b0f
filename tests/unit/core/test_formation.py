"""The decisions of `decide` and `decide_stop` in each situation of the group."""

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
    """Render a decision as the tables below write it: its reason and members."""
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
        # Holders of the state are waited for until the busy timeout, then ended.
        (view(NOBODY, A, NEW, status("d0", READY), formed_at=99.0), WaitReason.ASSEMBLING),
        (view(NOBODY, A, NEW, status("d0", READY), formed_at=-900.0), "JOIN_TIMED_OUT [] -a0"),
        (view(NOBODY, A_DONE, status("b0", READY, 3, committed=7)), "STARTED [b0]"),
        (view(NOBODY, A_DONE, status("b0", READY, 3, committed=4)), Complete),
        (view(NOBODY, A_DONE, NEW), Complete),
    ],
)
def test_a_group_forms_once_enough_are_ready(situation: GroupView, expected: object) -> None:
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
        # The group has no holder left, so a holder that came back is admitted at once.
        (
            view(generation(3, "a0", "c0"), NEW, status("b0", READY, 2)),
            "MEMBER_LOST [b0 c0]",
        ),
    ],
)
def test_a_group_changes_on_losses_and_newcomers(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A, status("b0", JOINING, 3), assembling_since=99.0), WaitReason.ASSEMBLING),
        # A member that has not acknowledged is left out soon, one that has and is busy later.
        (view(PAIR, A_JOINS, status("b0", TRAINING, 2)), "BELOW_MINIMUM [] -b0"),
        # a0 trains, so b0 has joined too, and only its reports are late.
        (view(PAIR, A, status("b0", TRAINING, 2), assembling_since=0.0), WaitReason.ASSEMBLING),
        (
            view(PAIR, A, status("b0", TRAINING, 2, acknowledged=3), assembling_since=0.0),
            WaitReason.ASSEMBLING,
        ),
        (
            view(PAIR, A, status("b0", TRAINING, 2, acknowledged=3), assembling_since=-900.0),
            "BELOW_MINIMUM [] -b0",
        ),
        # Before a planned change takes effect no member is late ...
        (
            view(
                PLANNED,
                *(status(w, TRAINING, 3, acknowledged=4) for w in ("a0", "b0")),
                status("c0", READY, acknowledged=4),
            ),
            WaitReason.ASSEMBLING,
        ),
        # ... and if it never takes effect, one of the members holds up the others.
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
def test_members_that_arrive_too_late_are_left_out(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A_DONE, B), WaitReason.STEADY),
        (view(PAIR, A_DONE), Complete),
        (view(PAIR, A_DONE, status("b0", READY, 3, broken=True, committed=7)), "MEMBER_LOST [b0]"),
        # b0 would wait in generation 4 for a0, which no longer needs a group.
        (view(SAVING, A_DONE, status("b0", JOINING, 4, committed=7)), "MEMBER_LOST [b0]"),
        # A newcomer has nothing to do in a job that others have finished.
        (view(PLANNED, A_DONE, A_DONE, status("c0", JOINING, 4, has_state=False)), Complete),
        # A finished member comes back to a group that is about to begin again, or has begun.
        (view(generation(4, "c0"), A_DONE, status("c0", READY)), Complete),
        (view(generation(4, "c0"), A_DONE, status("c0", TRAINING, 4)), WaitReason.STEADY),
    ],
)
def test_a_job_is_complete_once_all_holders_finish(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, POLICY, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "now", "expected"),
    [
        (view(None), 0.0, End(in_time=True)),
        (view(NOBODY, NEW), 0.0, WaitReason.ASSEMBLING),  # c0 may have been a member
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
def test_a_stop_saves_before_it_ends(situation: GroupView, now: float, expected: object) -> None:
    assert short(decide_stop(situation, POLICY, STOP, now)) == expected


@pytest.mark.parametrize(
    ("b_held", "now", "expected"),
    [
        (6, 10.0, "JOIN_TIMED_OUT [b0] -a0"),  # b0 saves as many steps
        (5, 10.0, WaitReason.ASSEMBLING),  # only a0 has the last step, and may be evaluating
        (5, 20.0, "JOIN_TIMED_OUT [b0] -a0"),  # the rest of the grace is for the save
    ],
)
def test_a_late_member_gets_the_grace_of_a_stop_if_only_it_has_the_last_step(
    b_held: int, now: float, expected: object
) -> None:
    late = status("a0", TRAINING, 3, acknowledged=4, committed=6)
    situation = view(SAVING, late, status("b0", JOINING, 4, committed=b_held), assembling_since=0.0)
    assert short(decide_stop(situation, POLICY, STOP, now)) == expected


def test_a_late_member_gets_no_grace_of_a_stop_if_one_that_is_back_has_as_many_steps() -> None:
    late, back = (
        status("a0", TRAINING, 3, acknowledged=4, committed=6),
        status("c0", READY, 3, committed=6),
    )
    situation = view(generation(4, "a0", purpose=Purpose.SAVE_AND_LEAVE), late, back)
    decision = decide_stop(replace(situation, assembling_since=0.0), POLICY, STOP, 10.0)
    assert short(decision) == "BELOW_MINIMUM [c0] -a0"


def test_a_stop_includes_a_worker_still_in_an_earlier_group_if_only_it_has_the_last_step() -> None:
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
def test_a_new_leader_adds_a_worker_back_with_the_last_step_to_the_members_that_save(
    trained_in: int, expected: str
) -> None:
    """A group that only saves adds no step, so it does not count as later than one that trained."""
    saving = [status(name, TRAINING, 4, committed=2, trained_in=3) for name in ("a0", "b0")]
    back = status("c0", READY, 3, committed=6, trained_in=trained_in)
    situation = view(SAVING, *saving, back, trained_in=4, adopted_at=0.0)
    assert short(decide_stop(situation, POLICY, STOP, 1.0)) == expected


def test_a_wait_for_a_late_member_lasts_until_its_timeout() -> None:
    late = status("b0", TRAINING, 2, acknowledged=3)
    decision = decide(view(PAIR, A, late, assembling_since=50.0), POLICY, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=50.0 + POLICY.busy_timeout_s)
    stalled = generation(3, "a0", "b0", reason=ChangeReason.STALLED)
    decision = decide(view(stalled, A, late, assembling_since=95.0), POLICY, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=95.0 + POLICY.join_timeout_s)


def test_members_in_a_slow_step_get_more_time_unless_the_step_has_stalled() -> None:
    policy = replace(POLICY, first_step_s=1000.0)
    late = status("b0", TRAINING, 2, acknowledged=3)
    decision = decide(view(PAIR, A, late, assembling_since=50.0, is_slow=True), policy, 500.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=1050.0)
    assert isinstance(
        decide(view(PAIR, A, late, assembling_since=50.0, is_slow=True), policy, 1050.0), Form
    )
    assert isinstance(decide(view(PAIR, A, late, assembling_since=-950.0), policy, 50.0), Form)
    impatient = replace(POLICY, first_step_s=1.0)  # no shorter than the busy timeout
    decision = decide(view(PAIR, A, late, assembling_since=50.0, is_slow=True), impatient, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=50.0 + POLICY.busy_timeout_s)
    stalled = generation(3, "a0", "b0", reason=ChangeReason.STALLED)
    decision = decide(view(stalled, A, late, assembling_since=95.0, is_slow=True), policy, 100.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=95.0 + POLICY.join_timeout_s)


def test_members_get_the_busy_timeout_again_once_a_slow_step_is_over() -> None:
    late = status("b0", TRAINING, 2, acknowledged=3)
    found = view(PAIR, A, late, assembling_since=50.0, slow_until=600.0)
    decision = decide(found, POLICY, 600.0)
    assert decision == Wait(reason=WaitReason.ASSEMBLING, until=600.0 + POLICY.busy_timeout_s)


def test_holders_of_the_state_that_compile_are_waited_for_when_the_group_is_dissolved() -> None:
    policy = replace(POLICY, first_step_s=1000.0)
    dissolved = view(
        generation(3), status("a0", TRAINING, 2, acknowledged=3), formed_at=50.0, is_slow=True
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
        # A new leader that knows of no generation: a0 and b0 train.
        (view(None, A, B, C, D), WaitReason.ENDING_THE_LAST_GROUP),
        # No group forms beside a worker that has run, or may have begun without a report.
        (view(NOBODY, A, C, D), WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, A_DONE, C, D), WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, C, D, past_members=frozenset({"c0"})), WaitReason.ENDING_THE_LAST_GROUP),
        (view(NOBODY, C, D, past_members=frozenset({"a0", "b0"})), "STARTED [c0 d0]"),
        # After a restart the nodes are there already: the wait for others is shorter.
        (view(NOBODY, C, D, slots=3, enough_since=96.0), WaitReason.GATHERING),
        (view(NOBODY, C, D, slots=3, enough_since=95.0), "STARTED [c0 d0]"),
    ],
)
def test_a_classic_group_forms_after_the_last_ended(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, WHOLE, 100.0)) == expected


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (view(PAIR, A, B), WaitReason.STEADY),
        (view(PAIR, A, B, stalled=True), WaitReason.STEADY),
        (view(PAIR, A), "MEMBER_LOST []"),
        (view(PAIR, A, C, D), "MEMBER_LOST []"),
        # A finished worker waits for the others; if one of them is lost, it restarts, too.
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
def test_any_change_dissolves_a_classic_group(situation: GroupView, expected: object) -> None:
    assert short(decide(situation, WHOLE, 100.0)) == expected


def test_a_full_group_of_classic_scripts_is_not_restarted_for_newcomers() -> None:
    situation = view(PAIR, A, B, C, newcomers_since=9.0)
    assert short(decide(situation, replace(WHOLE, max_workers=2), 100.0)) is WaitReason.STEADY


def test_a_classic_group_is_dissolved_when_one_of_its_nodes_leaves() -> None:
    situation = view(PAIR, A, B)
    leaving = replace(situation.workers["b0"], on_leaving_node=True)
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
def test_silent_classic_members_get_the_grace(silent: str, since: float, expected: object) -> None:
    situation = view(PAIR, A, B)
    workers = {
        name: replace(w, out_of_contact_since=since) if name in silent.split() else w
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
def test_a_stop_ends_classic_scripts(situation: GroupView, now: float, expected: object) -> None:
    assert short(decide_stop(situation, WHOLE, STOP, now)) == expected


def test_members_inside_a_call_go_on_without_newcomers() -> None:
    inside = [status(w, READY, 3, broken=True, in_run=True) for w in ("a0", "b0")]
    newcomer = status("c0", READY, 3, has_state=False)
    group = generation(3, "a0", "b0", "c0", "d0")
    assert short(decide(view(group, *inside, newcomer), POLICY, 100.0)) == "MEMBER_LOST [a0 b0]"


def test_the_loss_of_a_member_that_a_planned_change_drops_counts_before_the_change() -> None:
    waiting = [status(w, TRAINING, 3) for w in ("a0", "b0")]
    planned, before = generation(4, "a0", "b0", leave_after=9), generation(3, "a0", "b0", "c0")
    situation = view(planned, *waiting, previous_group=before)
    assert short(decide(situation, POLICY, 100.0)) == "MEMBER_LOST [a0 b0]"


def test_the_loss_of_a_dropped_member_counts_while_newcomers_wait_in_the_planned_group() -> None:
    waiting = [status("a0", TRAINING, 3), status("d0", JOINING, 4, has_state=False)]
    planned, before = generation(4, "a0", "d0", leave_after=9), generation(3, "a0", "c0")
    situation = view(planned, *waiting, previous_group=before)
    assert short(decide(situation, POLICY, 100.0)) == "MEMBER_LOST [a0 d0]"


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        # c0 may have completed the last step of the earlier group, or be about to.
        (status("c0", READY, 3, acknowledged=4, committed=10), "MEMBER_LOST [a0 c0]"),
        (status("c0", TRAINING, 3, acknowledged=4, committed=9), "MEMBER_LOST [a0 c0]"),
        # c0 has left, and the others went on from its last step.
        (status("c0", READY, 3, acknowledged=4, committed=9), "MEMBER_LOST [a0]"),
    ],
)
def test_a_dropped_member_rejoins_only_if_it_may_have_a_step_that_no_other_has(
    dropped: WorkerStatus, expected: str
) -> None:
    planned, before = generation(4, "a0", "b0", leave_after=9), generation(3, "a0", "b0", "c0")
    here = status("a0", TRAINING, 4, committed=9)
    situation = view(planned, here, dropped, previous_group=before)
    assert short(decide(situation, replace(POLICY, min_workers=1), 100.0)) == expected


def test_newcomers_make_room_for_dropped_members_that_hold_the_state() -> None:
    planned = generation(4, "c0", "d0", "e0", leave_after=9)
    new = [status(w, READY, has_state=False) for w in ("d0", "e0")]
    dropped = [
        status("a0", READY, 3, acknowledged=4, committed=9),
        status("b0", READY, 3, acknowledged=4),
    ]
    before = generation(3, "a0", "b0", "c0")
    situation = view(planned, *new, *dropped, previous_group=before)
    policy = replace(POLICY, max_workers=3)
    assert short(decide(situation, policy, 100.0)) == "MEMBER_LOST [a0 b0 d0]"


def test_a_leader_that_allows_fewer_members_drops_the_last_ranks() -> None:
    situation = view(generation(3, "a0", "b0", "c0"), A, B, status("c0", TRAINING, 3, committed=5))
    fewer = replace(POLICY, max_workers=2)
    assert short(decide(situation, fewer, 100.0)) == "MEMBER_LEAVING planned [a0 b0]"
    saves = replace(generation(3, "a0", "b0", "c0"), purpose=Purpose.SAVE_AND_LEAVE)
    assert short(decide(replace(situation, current=saves), fewer, 100.0)) is WaitReason.STEADY


def test_a_worker_still_in_its_old_group_with_more_steps_is_taken_along() -> None:
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


def test_the_loss_of_a_member_dissolves_its_group_before_the_planned_end() -> None:
    waiting = [status(w, TRAINING, 3) for w in ("a0", "b0")]
    ends, before = generation(4, leave_after=9), generation(3, "a0", "b0", "c0")
    assert (
        short(decide(view(ends, *waiting, previous_group=before), POLICY, 100.0))
        == "MEMBER_LOST []"
    )


def test_a_member_that_its_new_agent_has_not_heard_from_is_in_no_new_group() -> None:
    unheard = status("b0", STARTING, slot=None, endpoint="")
    situation = view(generation(3, "a0", "b0", "c0"), status("a0", TRAINING, 3), unheard)
    policy = replace(POLICY, min_workers=1)
    assert short(decide(situation, policy, 100.0)) == "MEMBER_LOST [a0]"
    stop = Stop(exit_code=143, reason="a test", deadline=130.0)
    assert short(decide_stop(situation, policy, stop, 100.0)) == "STOPPING [a0]"


@pytest.mark.parametrize(
    ("trained_in", "expected"),
    # The others have got no further than c0's group; or have gone on without it.
    [(3, "JOIN_TIMED_OUT [b0 c0] -a0"), (4, "JOIN_TIMED_OUT [b0] -a0")],
)
def test_a_returning_holder_of_the_last_step_is_taken_along(trained_in: int, expected: str) -> None:
    stuck = status("a0", READY, 3, acknowledged=4, committed=9)
    waits = status("b0", JOINING, 4, committed=8)
    back = status("c0", READY, 3, acknowledged=4, committed=9)
    group = generation(4, "a0", "b0")
    situation = view(group, stuck, waits, back, assembling_since=0.0, trained_in=trained_in)
    policy = replace(POLICY, min_workers=1, busy_timeout_s=50.0)
    assert short(decide(situation, policy, 100.0)) == expected


def test_no_group_begins_without_the_state_while_a_worker_may_have_got_it_in_another() -> None:
    comes_out = status("b0", JOINING, 3, acknowledged=4, has_state=False)
    newcomer = status("d0", READY, has_state=False)
    situation = view(generation(4, "c0"), comes_out, newcomer, trained_in=2, formed_at=100.0)
    policy = replace(POLICY, min_workers=1)
    assert short(decide(situation, policy, 109.0)) == WaitReason.OUT_OF_CONTACT
    assert short(decide(situation, policy, 110.0)) == "MEMBER_LOST [d0]"  # b0 is stuck there
    first = replace(situation, trained_in=0)  # there is no state yet
    assert short(decide(first, policy, 109.0)) == "MEMBER_LOST [d0]"


@pytest.mark.parametrize(
    ("members_trained_in", "expected"),
    [
        (1, "MEMBER_LOST [a0 c0]"),  # a later group of others trained too, and all of it is lost
        (3, "MEMBER_LOST [a0]"),  # the members' group went on without it
        (0, "MEMBER_LOST [a0]"),  # unknown: an earlier version of elastic does not report it
    ],
)
def test_a_worker_back_with_more_steps_is_taken_along_unless_the_members_trained_later(
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
def test_a_job_is_complete_if_only_steps_are_left_that_it_had_to_go_back_from(
    trained_in: int, expected: object
) -> None:
    done = status("a0", FINISHED, 3, committed=6, trained_in=3)
    back = status("c0", READY, 2, acknowledged=4, committed=7, trained_in=trained_in)
    situation = view(NOBODY, done, back, enough_since=0.0)
    assert short(decide(situation, POLICY, 100.0)) == expected


def test_members_out_of_contact_are_awaited_only_for_the_grace_once_others_have_finished() -> None:
    """A finished member is in contact, so it is not the coordinator that is cut off."""
    gone = silent(view(PAIR, A_DONE, B), since=90.0, nodes="b")
    patient = replace(POLICY, agent_grace_s=20.0)
    assert short(decide(gone, patient, 100.0)) is WaitReason.OUT_OF_CONTACT
    assert short(decide(gone, patient, 111.0)) is Complete
    everybody = silent(view(PAIR, A, B), since=90.0, nodes="ab")
    assert short(decide(everybody, patient, 111.0)) is WaitReason.OUT_OF_CONTACT


def test_a_holder_that_comes_back_joins_a_group_without_state_that_is_not_announced() -> None:
    """a0 has not heard yet that it was left out, so it still trains."""
    begun = view(
        generation(5, "c0"),
        status("c0", READY),
        status("a0", TRAINING, 3, committed=28),
        formed_at=99.0,
        unannounced=True,
        trained_in=3,
    )
    policy = replace(POLICY, min_workers=1)
    assert short(decide(begun, policy, 100.0)) == "STARTED [a0 c0]"
    told = replace(begun, unannounced=False)
    assert short(decide(told, policy, 100.0)) is WaitReason.ASSEMBLING
