"""The coordinator's machine: what it remembers between decisions, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.phases import JobPhase
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy, return_patience_s
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Purpose,
    WorkerStatus,
)
from elastic.core.restarts import Verdict
from tests.unit.core.cluster_views import (
    FINISHED,
    JOINING,
    READY,
    STARTING,
    TRAINING,
    generation,
    status,
)

SETTINGS = CoordinatorSettings(
    incarnation="x",
    formation=FormationPolicy(min_workers=1, max_workers=3, planned_interval_s=0.0),
    stall=StallPolicy(floor_s=5.0),
    stop_grace_s=30.0,
)


def report(node: str, *workers: WorkerStatus, slots: int = 2) -> ev.NodeReported:
    return ev.NodeReported(node=node, slots=slots, workers=workers)


def of(kind: type, effects: list[fx.Effect]) -> list[fx.Effect]:
    return [e for e in effects if isinstance(e, kind)]


def running(settings: CoordinatorSettings = SETTINGS) -> Coordinator:
    """Generation 1 of a0 and a1 trains."""
    machine = Coordinator(settings)
    machine.handle(report("a", status("a0", READY), status("a1", READY)), 0.0)
    machine.handle(ev.GenerationPersisted(number=1), 0.1)
    machine.handle(report("a", status("a0", TRAINING, 1), status("a1", TRAINING, 1)), 0.2)
    assert machine.phase is JobPhase.RUNNING
    return machine


def killed(worker: str) -> ev.WorkerFailed:
    failure = Failure(worker=worker, kind=FailureKind.SIGNAL, signature="signal 9")
    return ev.WorkerFailed(node=worker[0], failure=failure)


def persisted(effects: list[fx.Effect]) -> fx.PersistGeneration:
    (effect,) = of(fx.PersistGeneration, effects)
    return effect


def test_a_generation_is_announced_only_once_it_is_stored() -> None:
    machine = Coordinator(SETTINGS, last=generation(7))
    later = return_patience_s(SETTINGS.formation)
    effects = machine.handle(report("a", status("a0", READY), status("a1", READY)), later)
    assert persisted(effects).generation.number == 8
    assert not of(fx.AnnounceGeneration, effects)
    assert machine.current == generation(7)
    assert machine.handle(ev.GenerationPersisted(number=7), later) == []
    effects = machine.handle(ev.GenerationPersisted(number=8), later)
    assert of(fx.AnnounceGeneration, effects)


def test_a_leader_that_was_deposed_steps_down_and_does_nothing_more() -> None:
    machine = Coordinator(SETTINGS)
    machine.handle(report("a", status("a0", READY), status("a1", READY)), 0.0)
    effects = machine.handle(ev.PersistRefused(number=1, detail="lost the election"), 0.1)
    assert effects == [fx.StepDown(message="lost the election")]
    for event in (
        ev.TimerFired(),
        ev.GenerationPersisted(number=1),
        report("a", status("a0", READY)),
        ev.StopRequested(exit_code=143, reason="SIGTERM"),
    ):
        assert machine.handle(event, 1.0) == []
    assert machine.current is None


def test_a_death_while_a_generation_is_written_is_handled_once_it_is_stored() -> None:
    machine = Coordinator(SETTINGS)
    machine.handle(report("a", status("a0", READY), status("a1", READY)), 0.0)
    assert not of(fx.PersistGeneration, machine.handle(killed("a1"), 0.05))
    effects = machine.handle(ev.GenerationPersisted(number=1), 0.1)
    assert persisted(effects).generation.number == 2
    assert [m.worker for m in persisted(effects).generation.members] == ["a0"]


@pytest.mark.parametrize("event", [killed("a1"), report("a", status("a0", TRAINING, 1))])
def test_a_lost_member_is_reported_and_the_next_group_forms_without_it(event: ev.Event) -> None:
    effects = running().handle(event, 1.0)
    assert [m.worker for m in persisted(effects).generation.members] == ["a0"]
    (lost,) = of(fx.Lost, effects)
    assert lost.workers == ("a1",)


def test_a_newcomer_may_have_the_name_of_a_dead_worker_once_its_node_reports_without_it() -> None:
    machine = running()
    machine.handle(killed("a1"), 1.0)
    machine.handle(ev.GenerationPersisted(number=2), 1.1)
    late = report("a", status("a0", TRAINING, 2), status("a1", TRAINING, 1))
    assert not of(fx.PersistGeneration, machine.handle(late, 1.2))  # was sent before it failed
    machine.handle(report("a", status("a0", TRAINING, 2)), 1.3)
    machine.handle(report("a", status("a0", TRAINING, 2), status("a1", READY)), 2.0)
    assert persisted(machine.handle(ev.TimerFired(), 3.0)).generation.leave_after is not None


def test_a_newcomer_joins_after_the_steps_expected_within_the_notice() -> None:
    machine = running()
    machine.handle(ev.ProgressReported(generation=1, committed=40, step_s=0.05, in_step_s=0.0), 1.0)
    machine.handle(report("b", status("b0", READY)), 1.0)
    generation = persisted(machine.handle(ev.TimerFired(), 1.2)).generation
    assert generation.leave_after == 40 + 1 + round((0.2 + 0.35) / 0.05)


def planned() -> Coordinator:
    """Generation 2 of a0, a1 and b0 is announced, to be joined after step 1."""
    machine = running()
    machine.handle(report("b", status("b0", READY)), 1.0)
    machine.handle(ev.TimerFired(), 1.2)
    (announced,) = of(fx.AnnounceGeneration, machine.handle(ev.GenerationPersisted(number=2), 1.3))
    assert (announced.generation.leave_after, announced.generation.provisional) == (1, True)
    return machine


def hearing(worker: str, committed: int) -> WorkerStatus:
    return status(worker, TRAINING, 1, acknowledged=2, committed=committed)


def test_a_planned_change_is_settled_when_all_leaving_members_have_acknowledged_it() -> None:
    machine = planned()
    effects = machine.handle(report("a", hearing("a0", 0), status("a1", TRAINING, 1)), 1.4)
    assert not of(fx.SettleGeneration, effects)
    effects = machine.handle(report("a", hearing("a0", 0), hearing("a1", 3)), 1.5)
    (settled,) = of(fx.SettleGeneration, effects)
    assert (settled.generation.number, settled.generation.leave_after) == (2, 4)
    assert machine.current == machine.generation(2) == settled.generation
    effects = machine.handle(report("a", hearing("a0", 0), hearing("a1", 4)), 1.6)
    assert not of(fx.SettleGeneration, effects)


def test_a_member_lost_before_a_planned_change_is_settled_makes_it_an_unplanned_one() -> None:
    effects = planned().handle(killed("a1"), 1.4)
    assert not of(fx.SettleGeneration, effects)
    generation = persisted(effects).generation
    assert (generation.leave_after, generation.provisional) == (None, False)


def test_a_step_that_lasts_too_long_leads_to_a_new_group_even_before_a_planned_change() -> None:
    long = ev.ProgressReported(generation=1, committed=4, step_s=0.1, in_step_s=5.1)
    assert persisted(running().handle(long, 9.0)).generation.reason.name == "STALLED"
    machine = running()
    machine.handle(report("b", status("b0", READY)), 1.0)
    machine.handle(ev.TimerFired(), 1.2)
    machine.handle(ev.GenerationPersisted(number=2), 1.3)
    assert persisted(machine.handle(long, 9.0)).generation.reason.name == "STALLED"


def test_a_slow_step_is_named_even_if_others_were_committed_before_the_next_report() -> None:
    machine = running()
    began = ev.ProgressReported(generation=1, committed=4, step_s=0.1, in_step_s=0.1)
    machine.handle(began, 9.0)
    effects = machine.handle(replace(began, committed=7), 13.0)
    (slow,) = of(fx.StepWasSlow, effects)
    assert (slow.step, slow.usual_s) == (4, 0.1)
    assert slow.lasted_s == pytest.approx(3.8)


def test_a_pause_that_lasts_too_long_leads_to_a_new_group_even_before_a_planned_change() -> None:
    """Rank 0 is between two steps, and the members that wait for it are still in the old group."""
    machine = running(replace(SETTINGS, stall=StallPolicy(floor_s=5.0, pause_s=2.0)))
    machine.handle(report("b", status("b0", READY)), 1.0)
    machine.handle(ev.TimerFired(), 1.2)
    machine.handle(ev.GenerationPersisted(number=2), 1.3)
    idle = ev.ProgressReported(worker="a0", generation=1, committed=4, step_s=0.1, in_step_s=0.0)
    machine.handle(idle, 1.5)
    assert of(fx.ProbeGroup, machine.handle(idle, 4.0))
    waits = ev.ProgressReported(
        worker="a1", generation=1, committed=4, step_s=0.1, in_step_s=2.4, probed=True
    )
    assert persisted(machine.handle(waits, 4.1)).generation.reason.name == "STALLED"


@pytest.mark.parametrize(("committed_in", "known"), [(1, 9), (7, 4), (0, 4)])
def test_a_failure_tells_steps_that_nobody_has_reported(committed_in: int, known: int) -> None:
    machine = running()
    reported = ev.ProgressReported(generation=1, committed=4, step_s=0.1, in_step_s=0.1)
    machine.handle(reported, 1.0)
    machine.handle(replace(killed("a1"), committed=9, committed_in=committed_in), 1.1)
    assert machine.committed == known


def test_steps_of_a_group_that_was_given_up_count_until_another_one_trains() -> None:
    """Nodes whose agents were stopped report late how far their workers came."""
    machine = running()
    machine.handle(ev.NodeGone(node="a"), 1.0)
    machine.handle(ev.TimerFired(), 30.0)
    machine.handle(ev.GenerationPersisted(number=2), 30.1)
    assert machine.phase is JobPhase.WAITING
    machine.handle(report("a", status("a2", READY)), 30.2)
    machine.handle(replace(killed("a1"), committed=93, committed_in=1), 30.3)
    assert machine.committed == 93
    machine.handle(ev.TimerFired(), 60.0)
    machine.handle(ev.GenerationPersisted(number=3), 60.1)
    machine.handle(report("a", status("a2", TRAINING, 3, committed=20)), 60.2)
    assert machine.committed == 20
    machine.handle(replace(killed("a0"), committed=94, committed_in=1), 60.3)
    assert machine.committed == 20


def test_a_newcomer_that_joins_tells_nothing_of_the_jobs_steps() -> None:
    machine = running()
    reported = ev.ProgressReported(generation=1, committed=40, step_s=0.1, in_step_s=0.0)
    machine.handle(reported, 1.0)
    machine.handle(report("a", status("a2", READY)), 2.0)
    machine.handle(ev.TimerFired(), 3.0)
    machine.handle(ev.GenerationPersisted(number=2), 3.1)
    came = replace(reported, generation=2, committed=0, joining=True)
    machine.handle(came, 3.2)
    assert machine.committed == 40
    machine.handle(replace(came, committed=30, joining=False), 3.3)  # restored a checkpoint
    assert machine.committed == 30


def test_the_same_error_twice_ends_the_job_with_it() -> None:
    machine = Coordinator(SETTINGS)
    machine.handle(report("a", status("a0", STARTING)), 0.0)
    for worker, expected in (("a0", []), ("a1", [1])):
        failure = Failure(worker=worker, kind=FailureKind.EXCEPTION, signature="ValueError")
        effects = machine.handle(ev.WorkerFailed(node="a", failure=failure), 1.0)
        assert [e.exit_code for e in of(fx.EndJob, effects)] == expected
    (end,) = of(fx.EndJob, effects)
    assert end.verdict is Verdict.SAME_FAILURE_NO_PROGRESS
    assert end.failure == failure


def test_the_same_error_of_all_members_ends_a_job_that_saves_nothing() -> None:
    """The second one comes after the group was dissolved: too few workers were left."""
    machine = running(
        replace(
            SETTINGS,
            formation=replace(SETTINGS.formation, min_workers=2),
            saves=False,
        )
    )
    machine.handle(ev.ProgressReported(generation=1, committed=2, step_s=0.1, in_step_s=0.0), 0.5)
    for worker, expected in (("a0", []), ("a1", [1])):
        failure = Failure(worker=worker, kind=FailureKind.EXIT_CODE, signature="exit code 0")
        effects = machine.handle(ev.WorkerFailed(node="a", failure=failure), 1.0)
        assert [e.exit_code for e in of(fx.EndJob, effects)] == expected
        machine.handle(ev.GenerationPersisted(number=2), 1.1)


def test_a_checkpoint_is_committed_with_its_last_part_or_abandoned_with_its_writer() -> None:
    def shard(index: int) -> ev.ShardReported:
        return ev.ShardReported(worker=f"a{index}", generation=1, step=5, index=index, count=2)

    machine = running()
    assert not of(fx.CommitCheckpoint, machine.handle(shard(0), 1.0))
    assert of(fx.CommitCheckpoint, machine.handle(shard(1), 1.1))
    machine = running()
    machine.handle(shard(0), 1.0)
    effects = machine.handle(killed("a1"), 1.1)
    (abandoned,) = of(fx.AbandonCheckpoint, effects)
    assert abandoned.reason == "member_lost"
    assert persisted(effects).generation.save_first


def test_a_stop_forms_a_last_generation_that_saves_and_leaves() -> None:
    machine = running()
    stop = ev.StopRequested(exit_code=143, reason="SIGTERM")
    generation = persisted(machine.handle(stop, 1.0)).generation
    assert generation.purpose is Purpose.SAVE_AND_LEAVE
    assert generation.leave_after is not None
    machine.handle(ev.GenerationPersisted(number=2), 1.1)
    finished = report("a", status("a0", FINISHED, 2), status("a1", FINISHED, 2))
    effects = machine.handle(finished, 2.0)
    assert of(fx.DismissWorkers, effects)
    assert [e.exit_code for e in of(fx.EndJob, effects)] == [143]
    assert machine.phase is JobPhase.FINISHED


def test_a_stop_that_takes_too_long_has_failed() -> None:
    machine = running()
    machine.handle(ev.StopRequested(exit_code=143, reason="SIGTERM"), 1.0)
    effects = machine.handle(ev.GenerationPersisted(number=2), 1.1)
    (timer,) = of(fx.SetTimer, effects)
    assert timer.at <= 31.0
    assert of(fx.EndJob, machine.handle(ev.TimerFired(), 31.0))
    assert machine.phase is JobPhase.FAILED


def test_a_stop_below_the_minimum_saves_what_survivors_hold() -> None:
    settings = CoordinatorSettings(
        incarnation="x", formation=FormationPolicy(min_workers=2, max_workers=2)
    )
    machine = running(settings)
    machine.handle(killed("a1"), 1.0)
    machine.handle(ev.GenerationPersisted(number=2), 1.1)
    assert machine.phase is JobPhase.WAITING
    machine.handle(report("a", status("a0", READY, 1, acknowledged=2)), 1.2)
    effects = machine.handle(ev.StopRequested(exit_code=143, reason="SIGTERM"), 2.0)
    assert persisted(effects).generation.purpose is Purpose.SAVE_AND_LEAVE


def reported(in_step_s: float, committed: int = 7, **fields: Any) -> ev.ProgressReported:
    return ev.ProgressReported(
        generation=1, committed=committed, step_s=0.1, in_step_s=in_step_s, **fields
    )


def test_a_first_step_is_stalled_only_after_a_timeout_of_its_own() -> None:
    machine = running()
    assert not of(fx.PersistGeneration, machine.handle(reported(599.0, first_step=True), 600.0))
    effects = machine.handle(reported(601.0, first_step=True), 602.0)
    assert persisted(effects).generation.reason is ChangeReason.STALLED


def test_a_member_that_compiles_excuses_the_step_of_all_until_it_is_committed() -> None:
    machine = running()
    trains = status("a0", TRAINING, 1)
    compiles = report("a", trains, status("a1", TRAINING, 1, compiling=7))
    machine.handle(compiles, 1.0)
    machine.handle(report("a", trains, status("a1", TRAINING, 1)), 300.0)
    assert not of(fx.PersistGeneration, machine.handle(reported(300.0), 301.0))
    assert not of(fx.PersistGeneration, machine.handle(reported(0.0, committed=8), 302.0))
    effects = machine.handle(reported(6.0, committed=8), 310.0)
    assert persisted(effects).generation.reason is ChangeReason.STALLED


def test_the_busy_timeout_counts_from_the_end_of_a_compilation() -> None:
    formation = replace(SETTINGS.formation, busy_timeout_s=8.0, first_step_s=100.0)
    machine = running(replace(SETTINGS, formation=formation))
    machine.handle(report("b", status("b0", READY)), 0.3)
    assert of(fx.PersistGeneration, machine.handle(ev.TimerFired(), 0.4))
    machine.handle(ev.GenerationPersisted(number=2), 0.4)
    members = [status(w, TRAINING, 1, acknowledged=2) for w in ("a0", "a1")]
    machine.handle(report("a", members[0], replace(members[1], compiling=1)), 0.5)
    machine.handle(report("b", status("b0", JOINING, 2, has_state=False)), 0.6)
    assert not of(fx.PersistGeneration, machine.handle(ev.TimerFired(), 60.0))
    assert not of(fx.PersistGeneration, machine.handle(report("a", *members), 90.0))
    assert not of(fx.PersistGeneration, machine.handle(ev.TimerFired(), 97.9))
    assert of(fx.PersistGeneration, machine.handle(ev.TimerFired(), 98.0))


def test_an_infinite_first_step_timeout_sets_no_timer() -> None:
    formation = replace(SETTINGS.formation, first_step_s=math.inf)
    machine = running(replace(SETTINGS, formation=formation))
    machine.handle(killed("a1"), 1.0)
    effects = machine.handle(ev.GenerationPersisted(number=2), 1.1)
    machine.handle(ev.TimerFired(), 1.2)
    late = report("a", status("a0", TRAINING, 1, acknowledged=2, compiling=0))
    effects = machine.handle(late, 1.3)
    assert of(fx.SetTimer, effects) == [fx.SetTimer(at=None)]


def replaced(effects: list[fx.Effect]) -> list[str]:
    return [e.worker for e in of(fx.ReplaceWorker, effects)]


def test_a_worker_that_is_being_ended_is_in_no_group() -> None:
    machine = Coordinator(SETTINGS)
    machine.handle(report("a", status("a0", READY), status("a1", READY)), 0.0)
    machine.handle(ev.GenerationPersisted(number=1), 0.1)
    machine.handle(report("a", status("a0", JOINING, 1), status("a1", READY)), 0.2)
    left_out = machine.handle(ev.TimerFired(), 11.0)  # a1 has not heard of the group
    assert replaced(left_out) == ["a1"]
    machine.handle(ev.GenerationPersisted(number=2), 11.1)
    again = report("a", status("a0", TRAINING, 2), status("a1", READY, acknowledged=2))
    effects = machine.handle(again, 11.2)
    effects += machine.handle(ev.TimerFired(), 12.0)
    assert not of(fx.PersistGeneration, effects)
    assert effects[-1] == fx.SetTimer(at=21.0)
    late = machine.handle(ev.TimerFired(), 21.0)  # the request was lost
    assert [m.worker for m in persisted(late).generation.members] == ["a0", "a1"]


def test_a_worker_that_is_being_ended_is_in_no_group_even_if_none_can_form_without_it() -> None:
    machine = Coordinator(SETTINGS)
    both = [report(n, status(f"{n}0", READY), slots=1) for n in "ab"]
    machine.handle(ev.NodesReported(reports=tuple(both)), 40.0)
    machine.handle(ev.GenerationPersisted(number=1), 40.1)
    unheard = status("b0", JOINING, 1, has_state=False)
    machine.handle(report("b", unheard, slots=1), 40.2)
    machine.handle(report("c", status("c0", READY), status("c1", READY)), 40.3)
    second = machine.handle(ev.NodeLost(node="a"), 41.0)  # a0 may train on with b0
    assert persisted(second).generation.worker_ids == {"b0", "c0", "c1"}
    machine.handle(ev.GenerationPersisted(number=2), 41.1)
    joining = [status(c, JOINING, 2, has_state=False) for c in ("c0", "c1")]
    machine.handle(report("c", *joining), 41.2)
    effects = machine.handle(ev.TimerFired(), 52.0)
    assert replaced(effects) == ["b0"]
    assert not of(fx.PersistGeneration, effects)
    effects = machine.handle(killed("c1"), 52.1)
    assert not replaced(effects)
    assert not of(fx.PersistGeneration, effects)
    effects = machine.handle(killed("b0"), 52.2)
    assert [m.worker for m in persisted(effects).generation.members] == ["c0"]


def slow(worker: str) -> ev.StragglerFound:
    return ev.StragglerFound(worker=worker, message="was slow: rank 1")


def test_a_slow_member_is_replaced_and_the_others_train_on() -> None:
    machine = running()
    effects = machine.handle(slow("a1"), 1.0)
    (replaced,) = of(fx.ReplaceWorker, effects)
    assert isinstance(replaced, fx.ReplaceWorker)
    assert (replaced.worker, replaced.kind) == ("a1", FailureKind.SLOW)
    assert replaced.message == "was slow: rank 1"
    following = persisted(effects).generation
    assert [m.worker for m in following.members] == ["a0"]
    assert not of(fx.ReplaceWorker, machine.handle(slow("a1"), 1.1)), "it is being ended"


def test_a_slow_member_stays_where_the_group_would_be_too_small() -> None:
    few = replace(SETTINGS, formation=replace(SETTINGS.formation, min_workers=2))
    assert not of(fx.ReplaceWorker, running(few).handle(slow("a1"), 1.0))
    machine = running()
    assert not of(fx.ReplaceWorker, machine.handle(slow("stranger"), 1.0))
    machine.handle(ev.StopRequested(exit_code=82, reason="enough"), 1.0)
    assert not of(fx.ReplaceWorker, machine.handle(slow("a1"), 1.1))


def shard(worker: str, generation: int, step: int) -> ev.ShardReported:
    index = int(worker[-1])
    return ev.ShardReported(worker=worker, generation=generation, step=step, index=index, count=2)


def test_a_save_of_a_lineage_that_was_given_up_is_not_committed() -> None:
    machine = running()
    machine.handle(shard("a0", 1, 220), 1.0)
    (given_up,) = of(fx.AbandonCheckpoint, machine.handle(ev.GroupBegan(generation=3, step=40), 2))
    assert (given_up.step, given_up.reason) == (220, "superseded")  # type: ignore[attr-defined]
    for step in (220, 240):
        effects = machine.handle(shard("a0", 1, step), 3.0) + machine.handle(
            shard("a1", 1, step), 3.1
        )
        assert not of(fx.CommitCheckpoint, effects)
        assert [e.step for e in of(fx.AbandonCheckpoint, effects)] == [step, step]  # type: ignore[attr-defined]


def test_a_save_of_an_ancestor_is_committed_after_the_next_group_has_begun() -> None:
    machine = running()
    machine.handle(shard("a0", 1, 40), 1.0)
    assert not of(fx.AbandonCheckpoint, machine.handle(ev.GroupBegan(generation=2, step=42), 2.0))
    assert of(fx.CommitCheckpoint, machine.handle(shard("a1", 1, 40), 3.0))


def test_a_late_save_does_not_end_that_of_a_later_group() -> None:
    """The later group has gone back, so its saves are of fewer steps."""
    machine = running()
    machine.handle(report("a", status("a0", READY, 1, broken=True), status("a1", READY, 1)), 1.0)
    machine.handle(ev.TimerFired(), 30.0)
    machine.handle(ev.GenerationPersisted(number=2), 30.1)
    machine.handle(shard("a0", 2, 60), 31.0)
    assert of(
        fx.CommitCheckpoint,
        [*machine.handle(shard("a0", 1, 220), 32.0), *machine.handle(shard("a1", 1, 220), 32.0)],
    )
    assert of(fx.CommitCheckpoint, machine.handle(shard("a1", 2, 60), 33.0))


# ---- whether the job has begun


def test_a_job_may_begin_again_if_no_step_was_committed() -> None:
    machine = running()
    assert not machine.begun
    assert not persisted(machine.handle(killed("a0"), 5.0)).generation.begun


@pytest.mark.parametrize(
    "sign",
    [
        ev.GroupBegan(generation=1, step=0),
        replace(killed("a1"), committed=1, committed_in=1),
        report("a", status("a0", TRAINING, 1, committed=1), status("a1", TRAINING, 1)),
    ],
)
def test_a_job_that_has_committed_a_step_has_begun_for_good(sign: ev.Event) -> None:
    machine = running()
    effects = machine.handle(sign, 1.0)
    assert machine.begun
    effects += machine.handle(killed("a0"), 5.0)
    assert persisted(effects).generation.begun


@pytest.mark.parametrize("known_by", ["record", "generation"])
def test_a_new_leader_knows_that_the_job_has_begun(known_by: str) -> None:
    last = replace(generation(7), begun=known_by == "generation")
    machine = Coordinator(SETTINGS, last=last, begun=known_by == "record")
    later = return_patience_s(SETTINGS.formation)
    effects = machine.handle(report("a", status("a0", READY), status("a1", READY)), later)
    assert persisted(effects).generation.begun
