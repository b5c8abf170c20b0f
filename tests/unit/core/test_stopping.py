"""What a coordinator does while the job stops: workers that hold unsaved steps save them first."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import Purpose
from tests.unit.core.cluster_views import FINISHED, JOINING, READY, TRAINING, generation, status
from tests.unit.core.test_coordinator_of_many_nodes import (
    POLICY,
    Job,
    adopted,
    killed,
    reported,
    running,
    settings,
    trains,
)

STOP = ev.StopRequested(exit_code=143, reason="a test")
SAVING = generation(5, "a0", "b0", purpose=Purpose.SAVE_AND_LEAVE)


def ended(job: Job) -> list[int]:
    return [e.exit_code for e in job.told(fx.EndJob)]  # type: ignore[attr-defined]


def test_a_member_out_of_contact_is_waited_for() -> None:
    job = running("a0")
    job.tell(ev.NodeLost(node="a"))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(trains("a0", 1, committed=6)) == ["a0"]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_group_that_the_store_has_lost_may_be_told_of() -> None:
    first = Job(Coordinator(replace(settings(), agents_outlive=True), now=0.0))
    first.tell(STOP)
    assert (ended(first), first.wakes_at()) == ([], POLICY.join_timeout_s)
    first.tell(ev.TimerFired(), after_s=POLICY.join_timeout_s)
    assert ended(first) == [143]
    alone = Job(Coordinator(settings(), now=0.0))
    alone.tell(STOP)
    assert ended(alone) == [143]


def test_without_a_group_a_holder_out_of_contact_is_waited_for() -> None:
    job = running("a0", "b0", min_workers=2)
    assert job.tell(killed("b0")) == []
    job.report(status("a0", READY, 1, acknowledged=2))
    job.tell(ev.NodeLost(node="a"))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(status("a0", READY, 1, acknowledged=2)) == ["a0"]


def left_behind() -> Job:
    """Generation 2 of a0 alone, which went on when its connection to b0 broke."""
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"))
    assert job.report(status("a0", READY, 1, committed=9, broken=True)) == ["a0"]
    job.report(trains("a0", 2, committed=9))
    return job


def test_a_holder_left_behind_is_waited_for_when_who_went_on_is_lost() -> None:
    job = left_behind()
    assert job.tell(killed("a0")) == []
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(status("b0", READY, 1, acknowledged=3, committed=9)) == ["b0"]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_holder_left_behind_is_not_waited_for_while_who_went_on_is_here() -> None:
    job = left_behind()
    assert job.tell(STOP) == ["a0"]
    job.report(trains("a0", 3, committed=10))
    job.report(status("a0", FINISHED, 3, committed=10))
    assert ended(job) == [143]


def test_newcomers_wait_for_a_holder_left_behind_when_who_went_on_is_lost() -> None:
    job = left_behind()
    assert job.tell(killed("a0")) == []
    job.tell(ev.NodeGone(node="a"))
    assert job.report(status("c0", READY, acknowledged=3)) is None
    assert job.report(status("b0", READY, 1, acknowledged=3, committed=9)) == ["b0", "c0"]


def test_who_may_have_trained_since_it_reported_is_heard_first() -> None:
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    assert job.tell(killed("b0")) == []
    assert job.tell(STOP) is None
    job.report(status("a0", JOINING, 1, has_state=False))
    assert ended(job) == []
    assert job.report(status("a0", READY, 1, acknowledged=2, committed=1)) == ["a0"]


def test_who_is_stuck_on_its_way_in_is_not_waited_for_to_the_end() -> None:
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    job.report(status("a0", JOINING, 1, has_state=False))
    job.tell(killed("b0"))
    job.tell(STOP)
    job.tell(ev.TimerFired(), after_s=10.0)
    assert ended(job) == [143]


def test_who_comes_back_with_the_last_step_saves_it() -> None:
    job = running("a0", "b0", "c0", agent_grace_s=0.0)
    assert job.tell(ev.NodeLost(node="c")) == ["a0", "b0"]
    job.report(status("a0", JOINING, 2, committed=4))
    assert job.tell(STOP) == ["a0", "b0"]
    assert job.report(status("c0", READY, 1, acknowledged=3, committed=5)) is None
    assert job.tell(killed("b0")) == ["a0", "c0"]


def test_newcomers_do_not_leave_before_a_holder_left_behind_may_have_come() -> None:
    job = left_behind()
    assert job.report(status("c0", READY, acknowledged=2)) == ["a0", "c0"]
    job.tell(killed("a0"))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(trains("b0", 1, committed=9)) == []  # c0 would begin anew
    job.report(status("c0", READY, acknowledged=4))
    assert job.report(status("b0", READY, 1, acknowledged=4, committed=9)) == ["b0"]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_members_that_wait_at_the_end_are_not_to_come_to_another_boundary_first() -> None:
    """As where the news of a save was lost with a leader, after some had ended their scripts."""
    job = running("a0", "b0")
    job.report(status("a0", FINISHED, 1, committed=9))
    assert job.tell(STOP) == ["b0"]
    assert job.formed[-1].leave_after is None


def test_a_stop_is_not_kept_waiting_by_groups_of_members_that_hold_nothing() -> None:
    """As after the death of the only holder while it gave the first state to the others."""
    job = Job(Coordinator(settings(broken_grace_s=0.0)))
    pair = [status("a0", READY), status("a1", READY)]
    assert job.report(*pair, status("a2", READY)) == ["a0", "a1", "a2"]
    joins = [status(f"a{n}", JOINING, 1, has_state=False) for n in range(3)]
    assert job.tell(reported(*joins), STOP) == ["a0", "a1", "a2"]
    assert job.report(*(status(w, JOINING, 2, has_state=False) for w in ("a1", "a2"))) == []
    lost = {"acknowledged": 3, "has_state": False, "broken": True}
    job.report(status("a1", READY, 2, **lost), status("a2", JOINING, 2, has_state=False))
    assert ended(job) == []  # a2 may have got the state
    job.report(status("a1", READY, 2, **lost), status("a2", READY, 2, **lost))
    assert ended(job) == [143]


def test_a_new_coordinator_has_those_save_again_who_may_have_missed_that_they_are_done() -> None:
    job = adopted(SAVING)
    job.report(status("a0", FINISHED, 5))
    assert job.report(trains("b0")) == ["b0"]
    assert job.formed[-1].leave_after is None
    job.report(status("b0", FINISHED, 6))
    assert ended(job) == [143]


def test_a_new_coordinator_goes_on_to_stop_the_job() -> None:
    job = adopted(SAVING)
    assert job.machine.phase is JobPhase.DRAINING
    job.tell(ev.StopRequested(exit_code=7, reason="asked again"))
    job.tell(ev.StopRequested(exit_code=8, reason="too late"))
    job.tell(reported(status("a0", FINISHED, 5)), reported(status("b0", FINISHED, 5)))
    assert ended(job) == [7]


def test_a_new_coordinator_waits_for_survivors_before_it_ends_the_job() -> None:
    job = adopted(generation(5))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(status("a0", READY, 4, acknowledged=5), after_s=0.1) is None
    assert job.tell(ev.TimerFired(), after_s=10.0) == ["a0"]


def test_the_last_node_saves_before_it_goes() -> None:
    """Below the minimum its workers are in no group, and yet hold what is not saved."""
    job = running("a0", "b0", min_workers=2)
    assert job.tell(killed("b0")) == []
    job.tell(reported(node="b"), ev.NodeGone(node="b"))
    job.report(status("a0", READY, 1, acknowledged=2, committed=6))
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == ["a0"]
    assert job.told(fx.NodeDrained) == []
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_members_that_a_planned_change_was_about_to_drop_save_too() -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == ["b0"]
    assert sorted(job.tell(STOP) or []) == ["a0", "b0"]


def test_a_group_that_is_left_for_a_planned_change_is_needed_until_that_is_in_place() -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == ["b0"]
    after = status("a0", READY, 1, acknowledged=2, committed=8)
    job.tell(reported(after), reported(trains("b0", 1, acknowledged=2, committed=7)))
    assert job.told(fx.NodeDrained) == []
    job.report(status("b0", TRAINING, 2, committed=8))
    assert job.told(fx.NodeDrained) == [fx.NodeDrained(node="a")]


def test_a_group_that_has_lost_a_member_comes_to_no_boundary() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"), STOP)
    assert job.tell(ev.NodeGone(node="b")) == ["a0"]
    assert job.formed[-1].leave_after is None


def test_who_came_back_too_late_saves_if_the_others_hold_nothing_any_more() -> None:
    job = running("a0", "b0", min_workers=1)
    assert job.tell(killed("b0")) == ["a0"]
    job.report(status("a0", TRAINING, 2))
    assert job.tell(STOP, after_s=0.1) == ["a0"]
    job.tell(reported(status("c0", READY, 1, acknowledged=3, committed=4)))
    assert job.tell(reported(status("a0", JOINING, 3, has_state=False))) == ["c0", "a0"]


def test_who_came_back_too_late_saves_if_the_others_are_left_out() -> None:
    job = running("a0", "b0", "d0")
    assert job.tell(killed("b0")) == ["a0", "d0"]
    job.tell(reported(trains("a0", 2)), reported(status("d0", JOINING, 2, has_state=False)))
    job.report(status("c0", READY, 1, acknowledged=2, committed=4))
    assert sorted(job.tell(STOP, after_s=0.0) or []) == ["a0", "d0"]
    job.tell(reported(status("d0", JOINING, 3, has_state=False)))
    assert sorted(job.tell(killed("a0")) or []) == ["c0", "d0"]


def test_who_saves_is_not_told_that_the_checkpoint_is_given_up_for_a_lost_member() -> None:
    """It would leave, when in the next group it saves the same step."""
    job = running("a0", "b0")
    job.tell(STOP)
    job.tell(*(reported(status(w, TRAINING, 2, committed=4)) for w in ("a0", "b0")))
    job.tell(ev.ShardReported(worker="a0", generation=2, step=4, index=0, count=2))
    assert job.tell(killed("b0")) == ["a0"]
    assert job.told(fx.AbandonCheckpoint) == []
    # What it had written before it was lost is told late, and makes the save whole.
    job.tell(ev.ShardReported(worker="b0", generation=2, step=4, index=1, count=2))
    assert job.told(fx.CommitCheckpoint) == [fx.CommitCheckpoint(generation=2, step=4)]
    job.tell(ev.SaveReportedFailed(generation=3, step=4, message="no space"))
    assert len(job.told(fx.AbandonCheckpoint)) == 1


def test_who_fails_to_save_after_the_others_were_told_is_told_too() -> None:
    """It may have begun to save only then, and would wait for ever at the end of its script."""
    job = running("a0", "b0")
    failed = ev.SaveReportedFailed(generation=1, step=4, message="no space")
    for message in ("no space", "others were told before that it was given up"):
        job.tell(failed)
        (told,) = job.told(fx.AbandonCheckpoint)
        assert told == fx.AbandonCheckpoint(generation=1, step=4, message=message)
    past = ev.SaveReportedFailed(generation=9, step=4, message="no space")
    job.tell(past)
    job.told(fx.AbandonCheckpoint)
    job.tell(past)
    assert job.told(fx.AbandonCheckpoint) == []  # nobody waits in a group that is no more


def test_whoever_has_lost_contact_last_is_waited_for_in_its_turn() -> None:
    job = running("a0", "b0", min_workers=2)
    job.tell(ev.NodeLost(node="b"))
    job.report(status("a0", READY, 1, broken=True))
    assert job.formed[-1].members == ()
    job.report(status("a0", READY, 1, acknowledged=2))
    job.tell(STOP, ev.NodeLost(node="a"), after_s=7.0)
    job.tell(ev.TimerFired(), after_s=4.0)
    assert ended(job) == []  # b0 has had its time
    assert job.report(status("a0", READY, 1, acknowledged=2)) == ["a0"]


def test_a_planned_end_of_the_group_is_not_waited_for() -> None:
    job = running("a0", "b0", min_workers=2)
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == []
    assert job.formed[-1].leave_after is not None
    assert job.tell(STOP) == []
    assert job.formed[-1].leave_after is None


def test_a_group_that_has_lost_a_member_comes_to_no_boundary_at_which_to_save() -> None:
    job = adopted(generation(5, "a0", "b0", "c0"))
    job.tell(STOP)
    job.report(trains("a0", committed=6))
    job.report(trains("b0", committed=6))
    assert job.tell(ev.NodeGone(node="c")) == ["a0", "b0"]
    assert [g.leave_after for g in job.formed] == [None]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_holder_left_behind_is_waited_for_when_the_group_that_went_on_holds_nothing() -> None:
    """It went on without b0, and then lost a0 before c0 had received the state."""
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"))
    job.report(status("c0", READY))
    assert job.report(status("a0", READY, 1, committed=9, broken=True)) == ["a0"]
    job.report(trains("a0", 2, committed=9))
    job.tell(ev.TimerFired(), after_s=1.0)
    assert job.formed[-1].worker_ids == {"a0", "c0"}
    job.report(status("c0", JOINING, 3, has_state=False))
    job.tell(STOP)
    job.report(status("a0", JOINING, 4, committed=9), status("c0", JOINING, 4, has_state=False))
    assert job.tell(killed("a0")) is None
    assert ended(job) == []


def test_a_node_that_is_drained_meanwhile_saves_with_the_others() -> None:
    """A planned change would wait for a step that nobody takes any more."""
    job = running("a0", "b0")
    assert job.tell(STOP) == ["a0", "b0"]
    job.tell(reported(trains("a0", 2, committed=9)), reported(trains("b0", 2, committed=9)))
    assert job.tell(ev.NodeLeaving(node="b", reason="drained")) is None
    job.tell(reported(status("a0", FINISHED, 2)), reported(status("b0", FINISHED, 2)))
    assert ended(job) == [143]


def test_who_holds_no_step_is_not_waited_for_to_the_end() -> None:
    """Its script is stuck in the first group, which had committed nothing."""
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    job.report(status("a0", JOINING, 1, has_state=True))
    job.tell(killed("b0"))
    job.tell(STOP)
    job.tell(ev.TimerFired(), after_s=15.0)
    assert ended(job) == [143]


def trains_without_a_step() -> Job:
    """Of two members one is killed in the first step, and the group is dissolved."""
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    job.report(trains("a0", 1))
    assert job.tell(killed("b0")) == []
    job.tell(STOP)
    return job


def test_who_is_stuck_in_the_first_step_is_not_waited_for_to_the_end() -> None:
    job = trains_without_a_step()
    job.report(status("a0", TRAINING, 1, acknowledged=2))
    job.tell(ev.TimerFired(), after_s=1.0)
    assert ended(job) == []  # it may come out of that step, and even have completed it
    job.tell(ev.TimerFired(), after_s=10.0)
    assert ended(job) == [143]


def test_who_may_have_committed_the_first_step_is_waited_for() -> None:
    job = trains_without_a_step()
    job.tell(ev.TimerFired(), after_s=15.0)
    assert ended(job) == []  # it has not heard of the end of its group
    job.report(status("a0", READY, 1, acknowledged=2, committed=1))
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE
