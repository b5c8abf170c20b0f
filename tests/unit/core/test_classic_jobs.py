"""The coordinator of a script written for torchrun: each change restarts all workers once."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.phases import JobPhase
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.membership import Failure, FailureKind, Generation, WorkerStatus
from elastic.core.restarts import Verdict
from tests.unit.core.cluster_views import FINISHED, READY, TRAINING, status

SETTINGS = CoordinatorSettings(
    incarnation="x", formation=FormationPolicy(min_workers=2, max_workers=4), max_restarts=2
)


class Job:
    """A coordinator and the two nodes a and b with one slot each."""

    def __init__(self, settings: CoordinatorSettings = SETTINGS) -> None:
        self.machine = Coordinator(settings)
        self.now = 0.0
        self.effects = self.machine.handle(ev.ClassicScriptReported(), 0.0)

    def tell(self, event: ev.Event, after_s: float = 0.1) -> list[fx.Effect]:
        self.now += after_s
        self.effects = self.machine.handle(event, self.now)
        for effect in self.effects:
            if isinstance(effect, fx.PersistGeneration):
                self.effects += self.machine.handle(
                    ev.GenerationPersisted(number=effect.generation.number), self.now
                )
        return self.effects

    def report(self, *workers: WorkerStatus, after_s: float = 0.1) -> list[fx.Effect]:
        by_node: dict[str, list[WorkerStatus]] = {"a": [], "b": []}
        for worker in workers:
            by_node[worker.worker[0]].append(worker)
        effects: list[fx.Effect] = []
        for node, statuses in by_node.items():
            event = ev.NodeReported(node=node, slots=1, workers=tuple(statuses))
            effects += self.tell(event, after_s)
        return effects

    def fail(self, worker: str, kind: FailureKind = FailureKind.EXCEPTION) -> list[fx.Effect]:
        failure = Failure(worker=worker, kind=kind, signature="the same", message="no")
        return self.tell(ev.WorkerFailed(node=worker[0], failure=failure))

    def run(self, number: int) -> None:
        """Report two fresh workers, which form the next group and train."""
        fresh = [status(f"{node}{number}", READY) for node in "ab"]
        self.report(*fresh)
        current = self.current
        assert [m.worker for m in current.members] == [f"a{number}", f"b{number}"]
        self.report(*(replace(f, phase=TRAINING, generation=current.number) for f in fresh))
        assert self.machine.phase is JobPhase.RUNNING

    @property
    def current(self) -> Generation:
        current = self.machine.current
        assert current is not None
        return current

    def ended(self) -> fx.EndJob | None:
        return next((e for e in self.effects if isinstance(e, fx.EndJob)), None)


def test_a_failure_restarts_all_workers_once() -> None:
    job = Job()
    job.run(0)
    assert (job.current.restart_count, job.current.max_restarts) == (0, 2)
    job.fail("a0")
    assert job.current.members == ()
    job.fail("b0")  # because a0 was lost
    assert job.machine.restarts_spent(job.now) == 1
    job.run(1)
    assert job.current.restart_count == 1


def test_fresh_workers_wait_for_the_end_of_those_that_have_run() -> None:
    job = Job()
    job.run(0)
    still = replace(status("b0", TRAINING, 1), slot=0)
    job.fail("a0")
    job.report(status("a1", READY), still)
    assert job.current.members == ()
    job.report(status("a1", READY), status("b1", READY))
    assert len(job.current.members) == 2


def test_a_failure_that_recurs_ends_the_job_only_once_the_budget_is_spent() -> None:
    job = Job()
    for number in range(3):
        assert job.ended() is None
        job.run(number)
        job.fail(f"a{number}")
    end = job.ended()
    assert end is not None
    assert (end.exit_code, end.verdict) == (1, Verdict.BUDGET_SPENT)


def test_a_newcomer_costs_a_restart_and_none_of_the_budget() -> None:
    job = Job(replace(SETTINGS, formation=FormationPolicy(min_workers=1, max_workers=4)))
    job.tell(ev.NodeReported(node="a", slots=1, workers=(status("a0", READY),)))
    job.tell(ev.NodeReported(node="a", slots=1, workers=(status("a0", TRAINING, 1),)))
    both = (status("a0", TRAINING, 1), status("b0", READY))
    job.report(*both)
    job.tell(ev.TimerFired(), after_s=2.0)
    assert job.current.members == ()
    job.report(status("a1", READY), status("b0", READY))
    assert [m.worker for m in job.current.members] == ["a1", "b0"]
    assert job.current.restart_count == 1
    assert job.machine.restarts_spent(job.now) == 0


def test_the_job_is_complete_once_all_workers_have_finished() -> None:
    job = Job()
    job.run(0)
    job.report(status("a0", FINISHED, 1), status("b0", TRAINING, 1))
    assert job.ended() is None
    job.report(status("a0", FINISHED, 1), status("b0", FINISHED, 1))
    assert fx.DismissWorkers() in job.effects
    end = job.ended()
    assert end is not None
    assert end.exit_code == 0


def test_a_stop_ends_the_job_once_no_worker_runs() -> None:
    job = Job()
    job.run(0)
    job.tell(ev.StopRequested(exit_code=143, reason="SIGTERM"))
    assert job.current.members == ()
    assert job.ended() is None
    job.report()
    end = job.ended()
    assert end is not None
    assert (end.exit_code, end.message) == (143, "SIGTERM")


STRICT = replace(SETTINGS, nodes_may_fail=False, max_restarts=1)
"""As under torchrun."""


def test_a_lost_node_is_a_failure_where_it_counts_as_one() -> None:
    job = Job(STRICT)
    job.run(0)
    job.tell(ev.NodeLost(node="b"))
    job.fail("a0")  # because b0 was lost
    assert job.machine.restarts_spent(job.now) == 1
    assert job.current.members == ()
    job.run(1)
    job.tell(ev.NodeLost(node="b"))
    end = job.ended()
    assert end is not None
    assert (end.exit_code, end.verdict) == (1, Verdict.BUDGET_SPENT)
    assert end.failure is not None
    assert end.failure.message == "its node was lost"


def test_a_node_that_leaves_is_a_failure_where_it_counts_as_one() -> None:
    job = Job(replace(STRICT, max_restarts=0))
    job.run(0)
    job.tell(ev.NodeLeaving(node="b", reason="SIGTERM"))
    assert job.machine.phase is JobPhase.FAILED


def test_a_node_without_members_may_come_and_go() -> None:
    job = Job(replace(STRICT, max_restarts=0))
    job.tell(ev.NodeReported(node="b", slots=1, workers=(status("b0", READY),)))
    job.tell(ev.NodeLost(node="b"))
    assert job.machine.phase is JobPhase.GATHERING


def test_too_few_workers_for_too_long_end_the_job() -> None:
    formation = replace(SETTINGS.formation, give_up_s=5.0)
    job = Job(replace(SETTINGS, formation=formation))
    effects = job.tell(ev.NodeReported(node="a", slots=1, workers=(status("a0", READY),)))
    started = 0.0  # the first event
    assert fx.SetTimer(at=started + 5.0) in effects
    job.run(0)
    job.tell(ev.TimerFired(), after_s=10.0)
    assert job.ended() is None
    job.tell(ev.NodeLost(node="b"))
    job.report(status("a1", READY))
    job.tell(ev.TimerFired(), after_s=4.0)
    assert job.ended() is None
    job.tell(ev.TimerFired(), after_s=2.0)
    end = job.ended()
    assert end is not None
    assert end.exit_code == 1
    assert "only 1 of at least 2 workers were ready within 5 s" in end.message
