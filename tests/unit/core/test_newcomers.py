"""When newcomers may join after others have failed, and when none is admitted for long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.formation import decide
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.nodes import NewcomerPolicy, Newcomers
from elastic.core.coordinator.phases import JobPhase
from elastic.core.coordinator.view import FormationPolicy, ObservedWorker
from elastic.core.membership import ChangeReason, Failure, FailureKind, WorkerPhase
from elastic.core.restarts import Backoff, Verdict
from tests.unit.core.cluster_views import (
    READY,
    TRAINING,
    generation,
    leaving,
    status,
    view,
)
from tests.unit.core.test_coordinator import of, persisted, report
from tests.unit.core.test_formation import short

POLICY = NewcomerPolicy(backoff=Backoff(base_s=2.0), refusal=Backoff(base_s=60.0, cap_s=3600.0))
RAISED = Failure(worker="b0", kind=FailureKind.EXCEPTION, signature="KeyError train.py:7")
KILLED = Failure(worker="b0", kind=FailureKind.SIGNAL, signature="signal 9", code=9)


def newcomer(worker: str = "b0") -> ObservedWorker:
    return ObservedWorker(node=worker[0], status=status(worker, READY))


def fail(newcomers: Newcomers, number: int, now: float = 0.0, failure: Failure = RAISED) -> float:
    return newcomers.failed(newcomer(failure.worker), number, failure, now)


def trained(*workers: str, number: int = 1, newcomers: Newcomers | None = None) -> Newcomers:
    """Newcomers after these workers have committed a step together."""
    newcomers = newcomers or Newcomers(POLICY)
    group = generation(number, *workers)
    newcomers.arrived(group, view(group, *(status(w, TRAINING, number) for w in workers)).workers)
    newcomers.committed(number, 1)
    return newcomers


def until(newcomers: Newcomers, worker: str = "b0") -> float | None:
    return newcomers.held_back([newcomer(worker)]).get(worker)


def test_a_worker_is_new_until_its_group_has_committed_a_step() -> None:
    newcomers, group = Newcomers(POLICY), generation(3, "a0", "b0")
    present = view(group, status("a0", TRAINING, 3, committed=7), status("b0", TRAINING, 3))
    newcomers.committed(3, 8)  # not all have arrived: b0 has had no part in this step
    assert newcomers.awaits(group)
    newcomers.arrived(group, present.workers)
    assert not newcomers.awaits(group)
    for number, committed in ((3, 7), (2, 9)):
        newcomers.committed(number, committed)
        assert newcomers.is_new("a0")
    newcomers.committed(3, 8)
    assert not newcomers.is_new("a0")
    assert not newcomers.is_new("b0")


def test_each_failure_holds_back_the_next_newcomer_of_the_slot_for_longer() -> None:
    newcomers = trained("a0")
    assert until(newcomers) is None
    delays = []
    for number in range(2, 8):
        failure = replace(RAISED, signature=f"line {number}")
        assert fail(newcomers, number, now=100.0, failure=failure) == 0.0
        delays.append((until(newcomers) or 0.0) - 100.0)
    assert delays[0] == 0.0
    bounds = [(2.0, 4.0), (4.0, 8.0), (8.0, 16.0), (15.0, 30.0), (15.0, 30.0)]
    assert all(low <= d < high for d, (low, high) in zip(delays[1:], bounds, strict=True)), delays
    assert (until(newcomers, "b1") or 0.0) <= 100.0
    newcomers.node_gone("b")
    assert (until(newcomers) or 0.0) <= 100.0


@pytest.mark.parametrize(
    ("failures", "refused"),
    [
        ([(2, RAISED), (3, RAISED)], False),
        ([(2, RAISED), (3, RAISED), (4, RAISED)], True),
        ([(2, RAISED), (2, replace(RAISED, worker="c0")), (3, RAISED)], False),  # in two groups
        ([(0, RAISED), (0, RAISED), (0, RAISED), (0, RAISED)], False),  # were in no group
        ([(2, RAISED), (3, replace(RAISED, signature="x")), (4, RAISED)], False),
        ([(2, RAISED), (3, replace(RAISED, signature="x")), (4, RAISED), (5, RAISED)], True),
        ([(n, replace(RAISED, worker=f"{w}0")) for n, w in ((2, "b"), (3, "c"), (4, "d"))], True),
        ([(2, replace(RAISED, retryable=False))], True),
        ([(n, KILLED) for n in (2, 3, 4, 5, 6)], False),  # each may have a cause of its own
        ([(n, KILLED) for n in (2, 3, 4, 5, 6, 7)], True),
        (
            [
                (n, replace(RAISED, kind=FailureKind.LEFT_OUT, signature=f"LEFT_OUT: in {n}"))
                for n in (2, 3, 4)
            ],
            True,
        ),
    ],
)
def test_the_same_failure_in_several_groups_refuses_newcomers(
    failures: list[tuple[int, Failure]], refused: bool
) -> None:
    newcomers = trained("a0")
    told = [fail(newcomers, number, failure=failure) for number, failure in failures]
    assert [t > 0.0 for t in told] == [False] * (len(told) - 1) + [refused]
    assert ((until(newcomers, "e0") or 0.0) >= 60.0) is refused, "of whatever slot"


def test_a_refusal_is_told_once_and_grows_until_a_newcomer_has_joined_well() -> None:
    newcomers, now, told, waits = trained("a0"), 0.0, [], []
    for number in range(2, 8):
        told.append(fail(newcomers, number, now))
        waits.append((until(newcomers, "e0") or now) - now)
        now += 10_000.0
    assert [t > 0.0 for t in told] == [False, False, True, False, False, False]
    assert told[2] == pytest.approx(waits[2])
    bounds = [(60.0, 120.0), (120.0, 240.0), (240.0, 480.0), (480.0, 960.0)]
    assert all(low <= w < high for w, (low, high) in zip(waits[2:], bounds, strict=True)), waits
    trained("a0", "b0", number=8, newcomers=newcomers)
    assert until(newcomers, "e0") is None
    assert [fail(newcomers, n, now, replace(RAISED, worker="c0")) > 0.0 for n in (9, 10, 11)] == [
        False,
        False,
        True,
    ]


def test_steps_of_the_old_members_alone_do_not_end_a_refusal() -> None:
    newcomers = trained("a0", "d0")
    for number in (2, 3, 4):
        fail(newcomers, number)
    trained("a0", "d0", number=5, newcomers=newcomers)
    assert (until(newcomers) or 0.0) >= 60.0


def test_a_worker_that_has_trained_is_not_held_back() -> None:
    newcomers = trained("a0", "b0")
    for number in (2, 3, 4):
        fail(newcomers, number, failure=replace(RAISED, worker="c0"))
    assert until(newcomers, "b0") is None


def test_newcomers_join_as_soon_as_one_is_no_longer_held_back() -> None:
    group, settings = generation(3, "a0", "b0"), FormationPolicy(min_workers=1, max_workers=4)
    members = [status(w, TRAINING, 3) for w in ("a0", "b0")]
    ready = [status(w, READY) for w in ("c0", "d0")]

    def decided(now: float, **held_back: float) -> object:
        found = view(group, *members, *ready, held_back=held_back, newcomers_since=0.0)
        decision = decide(found, settings, now)
        return getattr(decision, "until", None) or short(decision)

    assert decided(100.0, c0=130.0, d0=120.0) == 120.0
    assert decided(100.0, c0=130.0) == "MEMBER_JOINED planned [a0 b0 d0]"
    assert decided(130.0, c0=130.0, d0=120.0) == "MEMBER_JOINED planned [a0 b0 c0 d0]"


def test_a_newcomer_that_is_held_back_takes_a_place_only_if_no_other_worker_can() -> None:
    group, settings = generation(3, "a0", "b0"), FormationPolicy(min_workers=1, max_workers=4)
    found = view(
        group,
        *(status(w, TRAINING, 3) for w in ("a0", "b0")),
        status("c0", READY),
        held_back={"c0": 1e9},
    )
    assert short(decide(leaving(found, "a"), settings, 100.0)) == "MEMBER_LEAVING planned [b0]"
    both = short(decide(leaving(found, "a", "b"), settings, 100.0))
    assert both == "MEMBER_LEAVING planned [b0 c0]"


# ---- in the machine

SETTINGS = CoordinatorSettings(
    incarnation="x",
    formation=FormationPolicy(
        min_workers=1,
        max_workers=3,
        gather_timeout_s=0.0,
        planned_interval_s=0.0,
        join_debounce_s=0.0,
    ),
    newcomers=POLICY,
    max_restarts=2,
)


class Job:
    """a0 trains, and newcomers come from node b."""

    def __init__(self, settings: CoordinatorSettings = SETTINGS, *, trains: bool = True) -> None:
        self.machine, self.now, self.number, self.committed = Coordinator(settings), 0.0, 1, 0
        self.formed = 0
        self.told: list[fx.RefuseNewcomers] = []
        self.tell(report("a", status("a0", READY)))
        self.exists()
        self.arrive()
        if trains:
            self.step()

    def tell(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.machine.handle(event, self.now)
        self.told += [e for e in effects if isinstance(e, fx.RefuseNewcomers)]
        self.formed += len(of(fx.PersistGeneration, effects))
        return effects

    def exists(self) -> None:
        self.tell(ev.GenerationPersisted(number=self.formed))

    def arrive(self) -> None:
        at = {"committed": self.committed, "acknowledged": self.formed}
        self.tell(report("a", status("a0", TRAINING, self.formed, **at)))

    def step(self) -> None:
        self.committed += 1
        self.tell(
            ev.ProgressReported(
                generation=self.formed, committed=self.committed, step_s=0.1, in_step_s=0.0
            )
        )

    def come(self, phase: WorkerPhase = READY, number: int = 0) -> list[fx.Effect]:
        return self.tell(report("b", status("b0", phase, number, has_state=False)))

    def fail(self, failure: Failure = RAISED) -> list[fx.Effect]:
        return self.tell(ev.WorkerFailed(node="b", failure=failure))

    def newcomer_fails_in_the_group(self) -> bool:
        """Report a newcomer. If it is admitted, it raises, a0 trains on, and the result is True."""
        before = self.formed
        self.tell(report("b"))  # without the last one, so that the next one may have its name
        self.come()
        if self.formed == before:
            return False
        self.exists()
        self.arrive()
        self.come(WorkerPhase.JOINING, self.formed)
        self.fail()
        self.exists()
        self.arrive()
        self.step()
        return True


def test_newcomers_that_keep_failing_are_admitted_ever_less_often_and_cost_no_restart() -> None:
    job, let_in = Job(), 0
    for _ in range(1000):
        job.now += 1.0
        let_in += job.newcomer_fails_in_the_group()
    assert job.machine.phase is not JobPhase.FAILED
    assert 5 <= let_in <= 7  # at 0, 1, 5, and after refusals of 60 to 120 s, 120 to 240 s ...
    assert job.formed == 1 + 2 * let_in
    (told,) = job.told
    assert told.failure == RAISED
    assert told.node == "b"
    assert job.machine.restarts_spent(job.now) == 0


def test_a_refusal_ends_by_itself() -> None:
    job = Job()
    while not job.told:
        job.now += 1.0
        job.newcomer_fails_in_the_group()
    job.tell(report("b"))
    (timer,) = of(fx.SetTimer, job.come())
    assert isinstance(timer, fx.SetTimer)
    assert timer.at == pytest.approx(job.now + job.told[0].retry_s)
    job.now = timer.at or 0.0
    effects = job.tell(ev.TimerFired())
    assert persisted(effects).generation.reason is ChangeReason.MEMBER_JOINED


@pytest.mark.parametrize("retryable", [True, False])
def test_a_newcomers_failure_is_the_jobs_while_no_other_worker_trains(retryable: bool) -> None:
    job = Job(trains=False)
    job.come(WorkerPhase.PREPARING)
    effects = job.fail(replace(RAISED, retryable=retryable))
    assert bool(of(fx.EndJob, effects)) is not retryable
    assert job.machine.restarts_spent(job.now) == int(retryable)


def test_a_newcomer_that_the_group_needs_ends_the_job_if_it_fails_twice() -> None:
    formation = replace(SETTINGS.formation, min_workers=2)
    job = Job(replace(SETTINGS, formation=formation), trains=False)
    job.come()
    for _ in range(2):
        effects = job.fail()
        job.tell(report("b", status("b1", READY)))
    effects = job.fail(replace(RAISED, worker="b1"))
    (end,) = of(fx.EndJob, effects)
    assert isinstance(end, fx.EndJob)
    assert end.verdict is Verdict.SAME_FAILURE_NO_PROGRESS


def test_the_failure_of_a_worker_that_has_trained_costs_a_restart() -> None:
    job = Job()
    job.come()
    job.exists()
    joined = {"committed": job.committed, "acknowledged": job.formed}
    job.arrive()
    job.tell(report("b", status("b0", TRAINING, job.formed, **joined)))
    job.step()
    job.fail()
    assert job.machine.restarts_spent(job.now) == 1
    assert not job.told


def test_a_new_leader_presumes_that_the_members_it_finds_have_trained() -> None:
    machine = Coordinator(SETTINGS, last=generation(7, "a0", "b0"))
    machine.handle(report("a", status("a0", TRAINING, 7)), 0.1)
    machine.handle(report("b", status("b0", TRAINING, 7)), 0.1)
    machine.handle(ev.WorkerFailed(node="b", failure=RAISED), 0.2)
    assert machine.restarts_spent(0.2) == 1


def test_the_errors_that_are_kept_are_bounded_even_if_each_message_differs() -> None:
    newcomers = trained("a0")
    for number in range(2, 3000):
        fail(newcomers, number, failure=replace(RAISED, signature=f"at {number}", retryable=False))
    assert len(newcomers._failed_in) == 1000
    assert len(newcomers._told) <= 1000


@pytest.mark.parametrize(
    ("code", "slot", "spent"),
    [(9, None, 0), (15, None, 0), (11, None, 1), (9, 0, 1)],
    ids=["killed", "asked to end", "a fault of its own", "with a slot"],
)
def test_a_killed_spare_costs_no_restart_while_the_job_gathers(
    code: int, slot: int | None, spent: int
) -> None:
    formation = replace(SETTINGS.formation, min_workers=2)
    machine = Coordinator(replace(SETTINGS, formation=formation))
    machine.handle(report("b", status("b0", WorkerPhase.SPARE, slot=slot)), 0.0)
    machine.handle(ev.WorkerFailed(node="b", failure=replace(KILLED, code=code)), 0.1)
    assert machine.restarts_spent(0.1) == spent
