"""When the coordinator asks for an explanation of a hang, and what it does with the verdict."""

from __future__ import annotations

from typing import Any

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.diagnosis import Diagnosis, SlowOrHungRank
from elastic.core.membership import Failure, FailureKind, WorkerStatus
from elastic.core.restarts import Verdict
from elastic.core.whereabouts import Frame
from tests.unit.core.cluster_views import JOINING, READY, TRAINING, status

FORMATION = FormationPolicy(
    min_workers=1, max_workers=3, planned_interval_s=0.0, join_timeout_s=2.0
)
SETTINGS = CoordinatorSettings(incarnation="x", formation=FORMATION, stall=StallPolicy(floor_s=5.0))
FRAME = Frame("/job/data.py", 41, "__getitem__")
LATE = "did not join generation 2 in time"


def verdict(worker: str, frame: Frame | None = FRAME, doing: str = "is stopped") -> Diagnosis:
    odd = SlowOrHungRank(rank=1, worker=worker, node="b", doing=doing, frame=frame, place_s=6.0)
    return Diagnosis(odd=(odd,), waiting=(0,), text="rank 1 (node b) hangs")


def of(kind: type, effects: list[fx.Effect]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def report(worker: WorkerStatus) -> ev.NodeReported:
    return ev.NodeReported(node=worker.worker[0], slots=1, workers=(worker,))


def progress(in_step_s: float, generation: int = 1) -> ev.ProgressReported:
    return ev.ProgressReported(generation=generation, committed=7, step_s=0.1, in_step_s=in_step_s)


def two_nodes() -> Coordinator:
    """Generation 1 of a0 and b0 trains."""
    machine = Coordinator(SETTINGS)
    ready = (report(status("a0", READY)), report(status("b0", READY)))
    machine.handle(ev.NodesReported(reports=ready), 40.0)
    machine.handle(ev.GenerationPersisted(number=1), 40.1)
    machine.handle(report(status("a0", TRAINING, 1)), 40.2)
    machine.handle(report(status("b0", TRAINING, 1)), 40.2)
    return machine


def hung(found: Diagnosis | None) -> tuple[Coordinator, list[fx.Effect]]:
    """b0 does not come out of its step. Return the machine and the effects of leaving b0 out."""
    machine = two_nodes()
    stalled = machine.handle(progress(5.1), 50.0)
    assert [type(e) for e in stalled][-3:] == [fx.ExplainHang, fx.Lost, fx.PersistGeneration]
    (asked,) = of(fx.ExplainHang, stalled)
    assert asked.generation.number == 1
    assert asked.step == 7
    assert asked.standing_s > 5.0
    if found is not None:
        assert not of(fx.PersistGeneration, machine.handle(_explained(found), 50.4))
    machine.handle(ev.GenerationPersisted(number=2), 50.5)
    machine.handle(report(status("b0", TRAINING, 1, acknowledged=2)), 50.6)
    machine.handle(report(status("a0", JOINING, 2)), 50.6)
    return machine, machine.handle(ev.TimerFired(), 53.0)


def _explained(found: Diagnosis, generation: int = 1) -> ev.HangExplained:
    return ev.HangExplained(generation=generation, verdict=found)


def test_a_hang_is_explained_before_the_change_and_again_if_no_verdict_came() -> None:
    _, effects = hung(None)
    (replaced,) = of(fx.ReplaceWorker, effects)
    assert (replaced.worker, replaced.message, replaced.place) == ("b0", LATE, "")
    assert of(fx.ExplainHang, effects), "nobody has told why it does not come"


def test_a_replaced_worker_is_reported_with_how_long_it_hung_and_where() -> None:
    _, effects = hung(verdict("b0"))
    (replaced,) = of(fx.ReplaceWorker, effects)
    assert replaced.message == "hung 9 s in data.py:41"
    assert replaced.place == "/job/data.py:41"
    assert not of(fx.ExplainHang, effects)


def test_a_worker_that_does_not_answer_is_replaced_without_a_place() -> None:
    _, effects = hung(verdict("b0", frame=None, doing="does not answer"))
    (replaced,) = of(fx.ReplaceWorker, effects)
    assert (replaced.message, replaced.place) == ("does not answer", "")


def test_a_verdict_on_another_worker_does_not_explain_the_replaced_one() -> None:
    _, effects = hung(verdict("a0"))
    (replaced,) = of(fx.ReplaceWorker, effects)
    assert replaced.message == LATE
    assert of(fx.ExplainHang, effects)


def test_a_verdict_on_an_earlier_group_does_not_explain_a_later_replacement() -> None:
    machine = two_nodes()
    machine.handle(progress(5.1), 50.0)
    machine.handle(_explained(verdict("b0")), 50.4)
    machine.handle(ev.GenerationPersisted(number=2), 50.5)
    for worker in ("a0", "b0"):  # the step has ended after all
        machine.handle(report(status(worker, TRAINING, 2)), 50.6)
    machine.handle(progress(5.1, generation=2), 60.0)
    machine.handle(ev.GenerationPersisted(number=3), 60.1)
    machine.handle(report(status("b0", TRAINING, 2, acknowledged=3)), 60.2)
    machine.handle(report(status("a0", JOINING, 3)), 60.2)
    (replaced,) = of(fx.ReplaceWorker, machine.handle(ev.TimerFired(), 63.0))
    assert replaced.message == "did not join generation 3 in time"


def test_a_hang_at_the_same_place_on_another_node_ends_the_job_with_the_verdict() -> None:
    machine, effects = hung(verdict("b0"))
    place = of(fx.ReplaceWorker, effects)[0].place

    def failed(worker: str) -> list[fx.Effect]:
        failure = Failure(
            worker=worker,
            kind=FailureKind.LEFT_OUT,
            signature=f"hung at {place}",
            message="hung 9 s in data.py:41",
            place=place,
        )
        return machine.handle(ev.WorkerFailed(node=worker[0], failure=failure), 54.0)

    assert not of(fx.EndJob, failed("b0"))
    machine.handle(ev.GenerationPersisted(number=3), 54.1)
    machine.handle(report(status("a0", TRAINING, 3)), 54.2)
    (end,) = of(fx.EndJob, failed("a0"))
    assert (end.exit_code, end.verdict) == (1, Verdict.SAME_FAILURE_NO_PROGRESS)
    assert end.message == "rank 1 (node b) hangs"


def test_a_slow_step_is_explained_once() -> None:
    machine = two_nodes()
    assert not of(fx.ExplainSlowStep, machine.handle(progress(0.9), 44.0))
    (asked,) = of(fx.ExplainSlowStep, machine.handle(progress(1.1), 44.2))
    assert (asked.step, asked.lasts_s, asked.usual_s) == (7, 1.1, 0.1)
    assert asked.generation.number == 1
    assert not of(fx.ExplainSlowStep, machine.handle(progress(1.3), 44.4))
