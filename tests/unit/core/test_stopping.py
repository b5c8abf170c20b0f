"""The coordinator while the job stops: workers that hold unsaved steps save them first."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import ChangeReason, Failure, FailureKind, Purpose
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


def test_a_stop_waits_for_a_member_out_of_contact() -> None:
    job = running("a0")
    job.tell(ev.NodeLost(node="a"))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(trains("a0", 1, committed=6)) == ["a0"]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_stop_without_a_generation_waits_for_agents_that_may_know_of_a_lost_one() -> None:
    first = Job(Coordinator(replace(settings(), agents_outlive=True), now=0.0))
    first.tell(STOP)
    assert (ended(first), first.wakes_at()) == ([], POLICY.join_timeout_s)
    first.tell(ev.TimerFired(), after_s=POLICY.join_timeout_s)
    assert ended(first) == [143]
    alone = Job(Coordinator(settings(), now=0.0))
    alone.tell(STOP)
    assert ended(alone) == [143]


def test_a_stop_without_a_group_waits_for_a_holder_out_of_contact() -> None:
    job = running("a0", "b0", min_workers=2)
    assert job.tell(killed("b0")) == []
    job.report(status("a0", READY, 1, acknowledged=2))
    job.tell(ev.NodeLost(node="a"))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(status("a0", READY, 1, acknowledged=2)) == ["a0"]


def left_behind() -> Job:
    """a0 trains alone in generation 2, with which it went on when its connection to b0 broke."""
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"))
    assert job.report(status("a0", READY, 1, committed=9, broken=True)) == ["a0"]
    job.report(trains("a0", 2, committed=9))
    return job


def test_a_stop_waits_for_a_holder_left_behind_when_those_that_went_on_are_lost() -> None:
    job = left_behind()
    assert job.tell(killed("a0")) == []
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(status("b0", READY, 1, acknowledged=3, committed=9)) == ["b0"]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_stop_does_not_wait_for_a_holder_left_behind_while_those_that_went_on_are_here() -> None:
    job = left_behind()
    assert job.tell(STOP) == ["a0"]
    job.report(trains("a0", 3, committed=10))
    job.report(status("a0", FINISHED, 3, committed=10))
    assert ended(job) == [143]


def test_newcomers_wait_for_a_holder_left_behind_when_those_that_went_on_are_lost() -> None:
    job = left_behind()
    assert job.tell(killed("a0")) == []
    job.tell(ev.NodeGone(node="a"))
    assert job.report(status("c0", READY, acknowledged=3)) is None
    assert job.report(status("b0", READY, 1, acknowledged=3, committed=9)) == ["b0", "c0"]


def test_a_stop_waits_for_a_member_that_may_have_trained_since_its_last_report() -> None:
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    assert job.tell(killed("b0")) == []
    assert job.tell(STOP) is None
    job.report(status("a0", JOINING, 1, has_state=False))
    assert ended(job) == []
    assert job.report(status("a0", READY, 1, acknowledged=2, committed=1)) == ["a0"]


def test_a_stop_does_not_wait_until_its_deadline_for_a_member_stuck_while_joining() -> None:
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    job.report(status("a0", JOINING, 1, has_state=False))
    job.tell(killed("b0"))
    job.tell(STOP)
    job.tell(ev.TimerFired(), after_s=10.0)
    assert ended(job) == [143]


def test_a_worker_that_comes_back_with_the_last_step_saves_it() -> None:
    job = running("a0", "b0", "c0", agent_grace_s=0.0)
    assert job.tell(ev.NodeLost(node="c")) == ["a0", "b0"]
    job.report(status("a0", JOINING, 2, committed=4))
    assert job.tell(STOP) == ["a0", "b0"]
    assert job.report(status("c0", READY, 1, acknowledged=3, committed=5)) is None
    assert job.tell(killed("b0")) == ["a0", "c0"]


def test_a_stop_with_only_newcomers_present_waits_for_a_holder_left_behind() -> None:
    job = left_behind()
    assert job.report(status("c0", READY, acknowledged=2)) == ["a0", "c0"]
    job.tell(killed("a0"))
    assert job.tell(STOP) is None
    assert ended(job) == []
    assert job.report(trains("b0", 1, committed=9)) == []  # c0 would begin the job again
    job.report(status("c0", READY, acknowledged=4))
    assert job.report(status("b0", READY, 1, acknowledged=4, committed=9)) == ["b0"]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_stop_takes_effect_at_once_if_a_member_waits_at_the_end_of_its_script() -> None:
    """The news of a save may be lost with a leader after some members have ended their scripts."""
    job = running("a0", "b0")
    job.report(status("a0", FINISHED, 1, committed=9))
    assert job.tell(STOP) == ["b0"]
    assert job.formed[-1].leave_after is None


def test_a_stop_ends_the_job_once_no_member_can_hold_the_state() -> None:
    """The only holder may die while it sends the first state to the others."""
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


def test_a_new_coordinator_has_members_that_have_not_finished_save_again() -> None:
    job = adopted(SAVING)
    job.report(status("a0", FINISHED, 5))
    assert job.report(trains("b0")) == ["b0"]
    assert job.formed[-1].leave_after is None
    job.report(status("b0", FINISHED, 6))
    assert ended(job) == [143]


def test_a_new_coordinator_continues_a_stop_and_takes_over_the_first_new_request() -> None:
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


def test_the_last_node_saves_before_it_leaves() -> None:
    """Below the minimum its worker is in no group, but holds steps that are not saved."""
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


def test_a_leaving_node_is_drained_only_once_the_planned_change_has_taken_effect() -> None:
    job = running("a0", "b0")
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == ["b0"]
    after = status("a0", READY, 1, acknowledged=2, committed=8)
    job.tell(reported(after), reported(trains("b0", 1, acknowledged=2, committed=7)))
    assert job.told(fx.NodeDrained) == []
    job.report(status("b0", TRAINING, 2, committed=8))
    assert job.told(fx.NodeDrained) == [fx.NodeDrained(node="a")]


def test_a_stop_of_a_group_that_has_lost_a_node_does_not_wait_for_a_boundary() -> None:
    job = running("a0", "b0")
    job.tell(ev.NodeLost(node="b"), STOP)
    assert job.tell(ev.NodeGone(node="b")) == ["a0"]
    assert job.formed[-1].leave_after is None


def test_a_worker_back_too_late_saves_if_the_others_no_longer_hold_the_state() -> None:
    job = running("a0", "b0", min_workers=1)
    assert job.tell(killed("b0")) == ["a0"]
    job.report(status("a0", TRAINING, 2))
    assert job.tell(STOP, after_s=0.1) == ["a0"]
    job.tell(reported(status("c0", READY, 1, acknowledged=3, committed=4)))
    assert job.tell(reported(status("a0", JOINING, 3, has_state=False))) == ["c0", "a0"]


def test_a_worker_back_too_late_saves_if_all_other_holders_are_lost() -> None:
    job = running("a0", "b0", "d0")
    assert job.tell(killed("b0")) == ["a0", "d0"]
    job.tell(reported(trains("a0", 2)), reported(status("d0", JOINING, 2, has_state=False)))
    job.report(status("c0", READY, 1, acknowledged=2, committed=4))
    assert sorted(job.tell(STOP, after_s=0.0) or []) == ["a0", "d0"]
    job.tell(reported(status("d0", JOINING, 3, has_state=False)))
    assert sorted(job.tell(killed("a0")) or []) == ["c0", "d0"]


def test_members_that_save_are_not_told_of_a_checkpoint_given_up_for_a_lost_member() -> None:
    """The member would leave, although it saves the same step in the next group."""
    job = running("a0", "b0")
    job.tell(STOP)
    job.tell(*(reported(status(w, TRAINING, 2, committed=4)) for w in ("a0", "b0")))
    job.tell(ev.ShardReported(worker="a0", generation=2, step=4, index=0, count=2))
    assert job.tell(killed("b0")) == ["a0"]
    assert job.told(fx.AbandonCheckpoint) == []
    # b0 wrote its part before it was lost: the late report makes the save whole.
    job.tell(ev.ShardReported(worker="b0", generation=2, step=4, index=1, count=2))
    assert job.told(fx.CommitCheckpoint) == [fx.CommitCheckpoint(generation=2, step=4)]
    job.tell(ev.SaveReportedFailed(generation=3, step=4, message="no space"))
    assert len(job.told(fx.AbandonCheckpoint)) == 1


def test_a_member_that_fails_to_save_after_the_others_were_told_is_told_too() -> None:
    """That member may begin to save only then, and would wait forever at the end of its script."""
    job = running("a0", "b0")
    failed = ev.SaveReportedFailed(generation=1, step=4, message="no space")
    for message in ("no space", "the other members already know that this save was given up"):
        job.tell(failed)
        (told,) = job.told(fx.AbandonCheckpoint)
        assert told == fx.AbandonCheckpoint(generation=1, step=4, message=message)
    past = ev.SaveReportedFailed(generation=9, step=4, message="no space")
    job.tell(past)
    job.told(fx.AbandonCheckpoint)
    job.tell(past)
    assert job.told(fx.AbandonCheckpoint) == []  # nobody waits in a group that no longer exists


def test_a_stop_waits_the_full_grace_for_the_member_that_lost_contact_last() -> None:
    job = running("a0", "b0", min_workers=2)
    job.tell(ev.NodeLost(node="b"))
    job.report(status("a0", READY, 1, broken=True))
    assert job.formed[-1].members == ()
    job.report(status("a0", READY, 1, acknowledged=2))
    job.tell(STOP, ev.NodeLost(node="a"), after_s=7.0)
    job.tell(ev.TimerFired(), after_s=4.0)
    assert ended(job) == []  # the grace of b0 is over, that of a0 is not
    assert job.report(status("a0", READY, 1, acknowledged=2)) == ["a0"]


def test_a_stop_does_not_wait_for_a_planned_dissolution() -> None:
    job = running("a0", "b0", min_workers=2)
    assert job.tell(ev.NodeLeaving(node="a", reason="SIGTERM")) == []
    assert job.formed[-1].leave_after is not None
    assert job.tell(STOP) == []
    assert job.formed[-1].leave_after is None


def test_a_stop_under_a_new_coordinator_saves_at_once_if_a_node_is_gone() -> None:
    job = adopted(generation(5, "a0", "b0", "c0"))
    job.tell(STOP)
    job.report(trains("a0", committed=6))
    job.report(trains("b0", committed=6))
    assert job.tell(ev.NodeGone(node="c")) == ["a0", "b0"]
    assert [g.leave_after for g in job.formed] == [None]
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


def test_a_stop_waits_for_a_holder_left_behind_if_the_group_that_went_on_lost_the_state() -> None:
    """The group went on without b0, and then lost a0 before c0 had received the state."""
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


def test_a_node_that_is_drained_during_a_stop_saves_with_the_others() -> None:
    """A planned change would wait for a step that no member takes any more."""
    job = running("a0", "b0")
    assert job.tell(STOP) == ["a0", "b0"]
    job.tell(reported(trains("a0", 2, committed=9)), reported(trains("b0", 2, committed=9)))
    assert job.tell(ev.NodeLeaving(node="b", reason="drained")) is None
    job.tell(reported(status("a0", FINISHED, 2)), reported(status("b0", FINISHED, 2)))
    assert ended(job) == [143]


def test_a_stop_does_not_wait_until_its_deadline_for_a_member_without_a_step() -> None:
    """The script of a0 is stuck in the first group, which has committed nothing."""
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    job.report(status("a0", JOINING, 1, has_state=True))
    job.tell(killed("b0"))
    job.tell(STOP)
    job.tell(ev.TimerFired(), after_s=15.0)
    assert ended(job) == [143]


def trains_without_a_step() -> Job:
    """One of two members is killed in the first step, the group is dissolved, and the job stops."""
    job = Job(Coordinator(settings(min_workers=2)))
    job.tell(reported(status("a0", READY)), reported(status("b0", READY)))
    job.report(trains("a0", 1))
    assert job.tell(killed("b0")) == []
    job.tell(STOP)
    return job


def test_a_stop_does_not_wait_until_its_deadline_for_a_member_stuck_in_the_first_step() -> None:
    job = trains_without_a_step()
    job.report(status("a0", TRAINING, 1, acknowledged=2))
    job.tell(ev.TimerFired(), after_s=1.0)
    assert ended(job) == []  # a0 may come out of that step, and may even have completed it
    job.tell(ev.TimerFired(), after_s=10.0)
    assert ended(job) == [143]


def test_a_stop_waits_for_a_member_that_may_have_committed_the_first_step() -> None:
    job = trains_without_a_step()
    job.tell(ev.TimerFired(), after_s=15.0)
    assert ended(job) == []  # a0 has not heard that its group is dissolved
    job.report(status("a0", READY, 1, acknowledged=2, committed=1))
    assert job.formed[-1].purpose is Purpose.SAVE_AND_LEAVE


# ---- a step that outlasts the grace


def stopping_in_step(*workers: str, saves: bool = True) -> Job:
    """The job stops with a grace of 30 s, and members are in a step that does not end."""
    job = Job(Coordinator(replace(settings(), saves=saves, stop_grace_s=30.0)))
    first = [replace(reported(status(w, READY)), slots=0) for w in workers]
    first[0] = replace(first[0], slots=len(workers))  # so that the machine waits for the others
    assert job.tell(*first) == list(workers)
    job.tell(*(reported(trains(w, 1, committed=6)) for w in workers))
    job.tell(STOP, after_s=0.0)
    assert job.formed[-1].leave_after is not None
    heard = {"committed": 6, "acknowledged": 2}
    job.tell(*(reported(trains(w, 1, **heard)) for w in workers), after_s=0.0)
    return job


def test_members_in_a_step_that_outlasts_the_grace_are_told_to_give_it_up_in_time_to_save() -> None:
    job = stopping_in_step("a0", "b0")
    give_up_at = job.now + 15.0  # at most half of the grace is kept for the save
    assert job.wakes_at() == give_up_at
    job.now = give_up_at
    assert job.tell(ev.TimerFired(), after_s=0.0) == ["a0", "b0"]
    told = job.formed[-1]
    assert (told.leave_after, told.purpose) == (None, Purpose.SAVE_AND_LEAVE)
    assert told.reason is ChangeReason.STALLED
    assert job.tell(ev.TimerFired(), after_s=1.0) is None  # once
    job.tell(*(reported(trains(w, 3, committed=6)) for w in ("a0", "b0")))
    job.tell(*(reported(status(w, FINISHED, 3, committed=6)) for w in ("a0", "b0")))
    assert ended(job) == [143]


def test_a_member_without_a_group_is_told_to_give_up_a_step_that_outlasts_the_grace() -> None:
    known = replace(settings(min_workers=2), saves=True, stop_grace_s=30.0)
    job = Job(Coordinator(known))
    first = [replace(reported(status(w, READY)), slots=s) for w, s in (("a0", 2), ("b0", 0))]
    assert job.tell(*first) == ["a0", "b0"]
    job.tell(*(reported(trains(w, 1, committed=6)) for w in ("a0", "b0")))
    assert job.tell(killed("b0")) == []
    in_step = reported(trains("a0", 1, committed=6, acknowledged=2))
    job.tell(in_step)
    job.tell(STOP, after_s=0.0)
    assert job.tell(in_step, after_s=14.0) is None
    assert job.tell(ev.TimerFired(), after_s=1.0) == ["a0"]
    told = job.formed[-1]
    assert (told.purpose, told.reason) == (Purpose.SAVE_AND_LEAVE, ChangeReason.STALLED)
    assert job.tell(ev.TimerFired(), after_s=1.0) is None  # once


def test_no_step_is_given_up_without_a_place_to_save_to_or_while_the_members_save() -> None:
    job = stopping_in_step("a0", saves=False)
    assert job.wakes_at() == job.now + 30.0
    assert job.tell(ev.TimerFired(), after_s=29.0) is None
    job = stopping_in_step("a0")
    job.report(trains("a0", 2, committed=7))  # it has come to the boundary, and saves
    assert job.tell(ev.TimerFired(), after_s=28.0) is None


def late_after_give_up(committed: int) -> Job:
    """a0 does not come out of its step at all, and b0 has committed this many."""
    job = stopping_in_step("a0", "b0")
    job.tell(ev.TimerFired(), after_s=15.0)
    job.tell(reported(trains("a0", 1, committed=6, acknowledged=3)))
    job.tell(reported(status("b0", JOINING, 3, committed=committed)), after_s=0.0)
    return job


def test_a_member_that_does_not_give_its_step_up_is_left_out_in_time_to_save() -> None:
    job = late_after_give_up(committed=6)
    assert job.tell(ev.TimerFired(), after_s=8.0) == ["b0"]
    assert job.now < 2.0 + 30.0 - 5.0


def test_workers_that_have_no_part_in_the_save_do_not_end_the_job_before_it() -> None:
    """Any number of them may give their script up, whatever the budget of restarts."""
    machine = Coordinator(replace(settings(), max_restarts=0))
    job = Job(machine)
    job.tell(replace(reported(status("a0", READY), status("a1", READY)), slots=2))
    job.report(trains("a0", 1, committed=6), trains("a1", 1, committed=6))
    job.tell(STOP)
    failure = Failure(worker="a1", kind=FailureKind.LEFT_OUT, signature="LEFT_OUT: late")
    assert job.tell(ev.WorkerFailed(node="a", failure=failure)) == ["a0"]
    assert ended(job) == []


def test_members_of_which_none_gives_its_step_up_have_the_whole_grace() -> None:
    job = stopping_in_step("a0", "b0")
    job.tell(ev.TimerFired(), after_s=15.0)
    stuck = {"committed": 6, "acknowledged": 3}
    job.tell(reported(trains("a0", 1, **stuck)), reported(trains("b0", 1, **stuck)))
    assert job.tell(ev.TimerFired(), after_s=13.0) is None
    assert ended(job) == []
    job.tell(ev.TimerFired(), after_s=2.0)
    assert ended(job) == [143]


# ---- a stop at the very end


def test_a_stop_does_not_have_a_newcomer_save_what_members_have_brought_to_its_end() -> None:
    """They end their scripts while a generation with it is being written. It has no state."""
    job = running("a0", "b0")
    job.writes_at_once = False
    assert job.report(status("c0", READY)) == ["a0", "b0", "c0"]
    at_end = {"committed": 9, "acknowledged": 1}
    job.tell(STOP, *(reported(status(w, FINISHED, 1, **at_end)) for w in ("a0", "b0")))
    assert job.tell(ev.GenerationPersisted(number=2)) is None
    assert ended(job) == [143]
