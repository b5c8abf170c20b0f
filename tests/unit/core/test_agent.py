"""The agent's machine: which processes a node runs, in which slots, and how it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.agent import effects as fx
from elastic.core.agent import events as ev
from elastic.core.agent.machine import Agent, AgentSettings
from elastic.core.membership import Failure, FailureKind, WorkerPhase, WorkerStatus
from tests.unit.core.cluster_views import generation

SETTINGS = AgentSettings(node="a", slots=2, spares=1)


def serving(settings: AgentSettings = SETTINGS) -> Agent:
    agent = Agent(settings)
    agent.handle(ev.Started(), 0.0)
    return agent


def reported(worker: str, phase: WorkerPhase, **fields: object) -> ev.WorkerReported:
    return ev.WorkerReported(status=WorkerStatus(worker=worker, phase=phase, **fields))  # type: ignore[arg-type]


def full() -> Agent:
    """Two workers have slots, and the third one is a spare."""
    agent = serving()
    for worker in ("a-1", "a-2", "a-3"):
        agent.handle(reported(worker, WorkerPhase.SPARE), 1.0)
    for worker in ("a-1", "a-2"):
        agent.handle(reported(worker, WorkerPhase.READY), 2.0)
    return agent


def of(kind: type, effects: list[fx.Effect]) -> list[fx.Effect]:
    return [e for e in effects if isinstance(e, kind)]


def killed(worker: str) -> ev.WorkerExited:
    return ev.WorkerExited(worker=worker, exit_code=0, signal=9)


def test_spares_start_only_once_the_script_is_known_to_wait_in_init() -> None:
    agent = Agent(SETTINGS)
    started = of(fx.SpawnWorker, agent.handle(ev.Started(), 0.0))
    assert started == [fx.SpawnWorker(worker="a-1"), fx.SpawnWorker(worker="a-2")]
    effects = agent.handle(reported("a-2", WorkerPhase.SPARE), 1.0)
    assert of(fx.AssignSlot, effects) == [fx.AssignSlot(worker="a-2", slot=0)]
    assert of(fx.SpawnWorker, effects) == [fx.SpawnWorker(worker="a-3")]


def test_a_worker_that_reports_as_spare_again_is_assigned_its_slot_again() -> None:
    """Its connection broke before the message came. It connects again and reports its old phase."""
    agent = full()
    again = agent.handle(reported("a-1", WorkerPhase.SPARE), 2.0)
    assert starts(again) == [fx.AssignSlot(worker="a-1", slot=0)]
    spare = agent.handle(reported("a-3", WorkerPhase.SPARE), 2.0)
    assert not starts(spare)


def test_a_spare_takes_the_slot_of_a_killed_worker() -> None:
    effects = full().handle(killed("a-2"), 3.0)
    assert of(fx.AssignSlot, effects) == [fx.AssignSlot(worker="a-3", slot=1)]
    assert of(fx.SpawnWorker, effects) == [fx.SpawnWorker(worker="a-4")]
    (failure,) = of(fx.ReportFailure, effects)
    assert failure.failure.kind is FailureKind.SIGNAL


# ---- the survivors of a loss go first


def training(*workers: str) -> Agent:
    """These workers train in generation 1; "a-4" is a spare."""
    agent = serving(replace(SETTINGS, slots=3))
    for worker in ("a-1", "a-2", "a-3", "a-4"):
        agent.handle(reported(worker, WorkerPhase.SPARE), 1.0)
    agent.handle(ev.GenerationAnnounced(generation=generation(1, *workers)), 2.0)
    for worker in workers:
        agent.handle(reported(worker, WorkerPhase.TRAINING, generation=1), 3.0)
    return agent


def starts(effects: list[fx.Effect]) -> list[fx.Effect]:
    return of(fx.AssignSlot, effects) + of(fx.SpawnWorker, effects)


def until(effects: list[fx.Effect]) -> float:
    """Return when the agent looks again; it must start no worker before that."""
    assert not starts(effects)
    (timer,) = of(fx.SetTimer, effects)
    assert isinstance(timer, fx.SetTimer)
    assert timer.at is not None
    return timer.at


TAKES_OVER = [fx.AssignSlot(worker="a-4", slot=2), fx.SpawnWorker(worker="a-5")]


def test_a_lost_worker_is_replaced_when_the_survivors_have_trained_on() -> None:
    agent = training("a-1", "a-2", "a-3")
    until(agent.handle(killed("a-3"), 10.0))
    announced = ev.GenerationAnnounced(generation=generation(2, "a-1", "a-2"))
    assert not starts(agent.handle(announced, 10.02))
    late = ev.WorkerRecovered(worker="a-1", generation=1)  # of the earlier group
    assert not starts(agent.handle(late, 10.05))
    done = ev.WorkerRecovered(worker="a-1", generation=2)
    assert starts(agent.handle(done, 10.1)) == TAKES_OVER


def test_a_lost_worker_is_replaced_after_a_delay_when_the_survivors_steps_are_long() -> None:
    agent = training("a-1", "a-2", "a-3")
    agent.handle(killed("a-3"), 10.0)
    announced = ev.GenerationAnnounced(generation=generation(2, "a-1", "a-2"))
    at = until(agent.handle(announced, 10.02))
    assert 10.1 < at <= 10.3
    assert starts(agent.handle(ev.TimerFired(), at)) == TAKES_OVER


def test_a_lost_worker_is_replaced_early_when_the_survivors_cannot_go_on_without_it() -> None:
    agent = training("a-1", "a-2", "a-3")
    at = until(agent.handle(killed("a-3"), 10.0))
    assert at <= 10.1
    assert starts(agent.handle(ev.TimerFired(), at)) == TAKES_OVER
    other = training("a-1", "a-2", "a-3")
    other.handle(killed("a-3"), 10.0)
    announced = ev.GenerationAnnounced(generation=generation(2, "b-1"))
    assert starts(other.handle(announced, 10.02)) == TAKES_OVER


def test_the_only_worker_of_a_node_is_replaced_at_once() -> None:
    agent = serving(replace(SETTINGS, slots=1))
    for worker in ("a-1", "a-2"):
        agent.handle(reported(worker, WorkerPhase.SPARE), 1.0)
    agent.handle(reported("a-1", WorkerPhase.TRAINING, generation=1), 3.0)
    assert starts(agent.handle(killed("a-1"), 10.0))


def test_a_worker_that_never_trained_is_replaced_at_once() -> None:
    agent = training("a-1", "a-2")
    assert starts(agent.handle(killed("a-3"), 10.0)) == TAKES_OVER


def test_a_worker_that_could_not_be_forked_is_retried_after_growing_delays() -> None:
    agent = full()
    (spawn,) = of(fx.SpawnWorker, agent.handle(killed("a-2"), 3.0))
    now, asked = 3.0, []
    for _ in range(4):
        effects = agent.handle(ev.WorkerNotSpawned(worker=spawn.worker), now)
        assert not of(fx.ReportFailure, effects)  # the restart budget is for failures of the script
        assert not of(fx.EndWorker, effects)
        if not (again := of(fx.SpawnWorker, effects)):
            (timer,) = of(fx.SetTimer, effects)
            assert timer.at > now
            now = timer.at
            again = of(fx.SpawnWorker, agent.handle(ev.TimerFired(), now))
        (spawn,) = again
        asked.append(now)
    assert asked[1] < asked[2] < asked[3]
    assert not agent.handle(ev.WorkerNotSpawned(worker="a-99"), now + 100.0)[:-1]


def test_a_killed_worker_is_reported_before_its_memory_is_freed_and_keeps_its_slot() -> None:
    agent = full()
    dying = agent.handle(replace(killed("a-2"), gone=False), 3.0)
    (failure,) = of(fx.ReportFailure, dying)
    assert isinstance(failure, fx.ReportFailure)
    assert failure.failure.message == "was ended by SIGKILL (signal 9)"
    (view,) = of(fx.ReportNode, dying)
    assert isinstance(view, fx.ReportNode)
    assert [status.worker for status in view.workers] == ["a-1", "a-3"]
    assert not of(fx.AssignSlot, dying)
    assert not of(fx.ReportFailure, agent.handle(ev.WorkerFrozen(worker="a-2", silent_s=9.0), 3.5))
    gone = agent.handle(killed("a-2"), 4.0)
    assert not of(fx.ReportFailure, gone)
    assert of(fx.AssignSlot, gone) == [fx.AssignSlot(worker="a-3", slot=1)]


def test_a_killed_spare_gets_no_slot_and_no_deadline_while_its_memory_is_freed() -> None:
    agent = full()
    agent.handle(replace(killed("a-3"), gone=False), 3.0)
    effects = agent.handle(killed("a-2"), 3.1)
    assert not of(fx.AssignSlot, effects)
    (timer,) = of(fx.SetTimer, agent.handle(replace(killed("a-1"), gone=False), 500.0))
    assert isinstance(timer, fx.SetTimer)
    assert timer.at is None or timer.at > 500.0


def test_an_exception_of_the_script_is_reported_instead_of_its_exit_code() -> None:
    agent, raised = full(), Failure(worker="a-1", kind=FailureKind.EXCEPTION, signature="x")
    agent.handle(ev.WorkerReportedFailure(failure=raised), 3.0)
    effects = agent.handle(ev.WorkerExited(worker="a-1", exit_code=1), 3.0)
    assert of(fx.ReportFailure, effects) == [fx.ReportFailure(failure=raised)]


def test_a_worker_that_ended_unseen_is_judged_by_its_own_last_report() -> None:
    def unseen(worker: str) -> ev.WorkerExited:
        return ev.WorkerExited(worker=worker, exit_code=0, unseen=True)

    agent, raised = full(), Failure(worker="a-1", kind=FailureKind.EXCEPTION, signature="x")
    agent.handle(ev.WorkerReportedFailure(failure=raised), 3.0)
    effects = agent.handle(unseen("a-1"), 3.0)
    assert of(fx.ReportFailure, effects) == [fx.ReportFailure(failure=raised)]
    (reported_,) = of(fx.ReportFailure, agent.handle(unseen("a-2"), 3.0))
    assert reported_.failure.signature == "ended unseen"
    agent = full()
    agent.handle(reported("a-1", WorkerPhase.FINISHED), 3.0)
    assert not of(fx.ReportFailure, agent.handle(unseen("a-1"), 3.0))


@pytest.mark.parametrize(
    ("number", "out_of_memory", "said"),
    [
        (9, False, "was ended by SIGKILL (signal 9)"),
        (9, True, "was ended by SIGKILL (signal 9): the kernel had no memory left"),
        (11, True, "was ended by SIGSEGV (signal 11)"),  # another process was killed
        (99, False, "was ended by signal 99"),
    ],
)
def test_a_death_by_signal_is_reported_with_the_signals_name_and_cause(
    number: int, out_of_memory: bool, said: str
) -> None:
    exited = ev.WorkerExited(worker="a-2", exit_code=0, signal=number, out_of_memory=out_of_memory)
    (failure,) = of(fx.ReportFailure, full().handle(exited, 3.0))
    assert isinstance(failure, fx.ReportFailure)
    assert failure.failure.message.startswith(said)
    assert failure.failure.code == number


def test_a_death_with_the_zygote_is_not_taken_for_one_by_itself() -> None:
    exited = ev.WorkerExited(worker="a-2", exit_code=0, signal=9, with_zygote=True)
    (failure,) = of(fx.ReportFailure, full().handle(exited, 3.0))
    assert isinstance(failure, fx.ReportFailure)
    assert failure.failure.message.startswith("was ended by SIGKILL (signal 9): the zygote")


def test_a_kill_by_the_agent_is_not_reported_as_out_of_memory() -> None:
    agent = full()
    agent.handle(ev.WorkerFrozen(worker="a-2", silent_s=70.0), 3.0)
    exited = ev.WorkerExited(worker="a-2", exit_code=0, signal=9, out_of_memory=True)
    (failure,) = of(fx.ReportFailure, agent.handle(exited, 4.0))
    assert isinstance(failure, fx.ReportFailure)
    assert failure.failure.message == "did not respond for 70.0 s"


def test_starts_without_progress_are_spaced_out() -> None:
    agent, now, starts = serving(AgentSettings(node="a", slots=1)), 0.0, []
    for n in range(1, 4):
        effects = agent.handle(ev.WorkerExited(worker=f"a-{n}", exit_code=1), now)
        if not of(fx.SpawnWorker, effects):
            (timer,) = of(fx.SetTimer, effects)
            assert timer.at > now
            now = timer.at
            assert of(fx.SpawnWorker, agent.handle(ev.TimerFired(), now))
        starts.append(now)
    assert starts[0] == 0.0 < starts[1] < starts[2]


def test_a_late_status_does_not_take_the_slot_away() -> None:
    agent = full()
    effects = agent.handle(reported("a-1", WorkerPhase.TRAINING, slot=None), 3.0)
    (view,) = of(fx.ReportNode, effects)
    assert [w.slot for w in view.workers] == [0, 1, None]


def test_a_generation_goes_to_workers_with_a_slot_and_later_to_those_that_prepare() -> None:
    agent, first = full(), generation(1, "a0")
    effects = agent.handle(ev.GenerationAnnounced(generation=first), 3.0)
    assert [e.worker for e in of(fx.ForwardGeneration, effects)] == ["a-1", "a-2"]
    assert not of(fx.ForwardGeneration, agent.handle(ev.GenerationAnnounced(generation=first), 3.0))
    effects = agent.handle(reported("a-3", WorkerPhase.PREPARING), 4.0)
    assert [e.worker for e in of(fx.ForwardGeneration, effects)] == ["a-3"]


def test_the_settled_form_of_a_generation_is_forwarded_once() -> None:
    agent, settled = full(), generation(2, "a0", leave_after=7)
    provisional = replace(settled, provisional=True)
    for announced, forwarded in ((provisional, 2), (settled, 2), (settled, 0), (provisional, 0)):
        effects = agent.handle(ev.GenerationAnnounced(generation=announced), 3.0)
        assert len(of(fx.ForwardGeneration, effects)) == forwarded
    assert agent.generation == settled
    (caught_up,) = of(
        fx.ForwardGeneration, agent.handle(reported("a-3", WorkerPhase.PREPARING), 4.0)
    )
    assert caught_up.generation == settled


def test_a_worker_that_never_gets_ready_is_replaced_after_the_start_timeout() -> None:
    agent = serving(AgentSettings(node="a", slots=1, spares=0, start_timeout_s=10.0))
    agent.handle(reported("a-1", WorkerPhase.SPARE), 1.0)
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 10.9))
    effects = agent.handle(ev.TimerFired(), 11.0)
    assert of(fx.EndWorker, effects) == [fx.EndWorker(worker="a-1", how=fx.How.DUMP_AND_KILL)]
    (failure,) = of(fx.ReportFailure, agent.handle(killed("a-1"), 11.1))
    assert failure.failure.kind is FailureKind.START_TIMEOUT


def test_a_replaced_worker_is_ended_once_and_reported_with_the_coordinators_kind() -> None:
    agent = full()
    request = ev.ReplaceRequested(worker="a-1", kind=FailureKind.LEFT_OUT, message="late")
    assert len(of(fx.EndWorker, agent.handle(request, 3.0))) == 1
    assert not of(fx.EndWorker, agent.handle(request, 3.1))
    (failure,) = of(fx.ReportFailure, agent.handle(killed("a-1"), 3.2))
    assert failure.failure.kind is FailureKind.LEFT_OUT


def test_a_complete_job_ends_finished_workers_only_after_a_grace_and_the_rest_at_once() -> None:
    agent = full()
    agent.handle(reported("a-1", WorkerPhase.FINISHED), 3.0)
    effects = agent.handle(ev.JobEnded(exit_code=0), 4.0)
    assert of(fx.DismissWorker, effects) == [fx.DismissWorker(worker="a-1")]
    assert [e.worker for e in of(fx.EndWorker, effects)] == ["a-2", "a-3"]
    (timer,) = of(fx.SetTimer, effects)
    late = agent.handle(ev.TimerFired(), timer.at)
    assert "a-1" in [e.worker for e in of(fx.EndWorker, late)]
    for worker in ("a-1", "a-2"):
        assert not of(fx.ExitAgent, agent.handle(killed(worker), 10.0))
    assert of(fx.ExitAgent, agent.handle(killed("a-3"), 10.0)) == [fx.ExitAgent(exit_code=0)]


def test_an_agent_exits_in_time_although_the_ends_of_its_workers_are_never_reported() -> None:
    """A zygote that is stopped, or whose disk hangs, neither forks nor reports."""
    agent = full()
    (timer,) = of(fx.SetTimer, agent.handle(ev.StopRequested(exit_code=130), 4.0))
    assert timer.at is not None
    assert not of(fx.ExitAgent, agent.handle(ev.TimerFired(), timer.at - 0.1))
    effects = agent.handle(ev.TimerFired(), timer.at)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=130)]


def test_the_first_signal_asks_the_job_to_stop_and_the_second_ends_the_workers() -> None:
    agent = full()
    leave = ev.LeaveRequested(exit_code=143, reason="SIGTERM")
    assert of(fx.AskToStop, agent.handle(leave, 3.0))
    effects = agent.handle(ev.StopRequested(exit_code=143), 3.5)
    assert [e.worker for e in of(fx.EndWorker, effects)] == ["a-1", "a-2", "a-3"]
    assert not of(fx.SpawnWorker, agent.handle(killed("a-1"), 3.6))


# ---- scripts written for torchrun

CLASSIC = AgentSettings(node="a", slots=2, spares=1, classic=True, end_grace_s=5.0)


def running_pair(settings: AgentSettings = CLASSIC) -> Agent:
    """Two workers run a classic script in generation 1, and one spare waits."""
    agent = serving(settings)
    for worker in ("a-1", "a-2", "a-3"):
        agent.handle(reported(worker, WorkerPhase.SPARE), 1.0)
    agent.handle(ev.GenerationAnnounced(generation=generation(1, "a-1", "a-2")), 2.0)
    for worker in ("a-1", "a-2"):
        agent.handle(reported(worker, WorkerPhase.TRAINING, generation=1), 3.0)
    return agent


def dissolved(number: int = 2) -> ev.GenerationAnnounced:
    return ev.GenerationAnnounced(generation=generation(number))


def asked(effects: list[fx.Effect]) -> list[str]:
    return [e.worker for e in of(fx.EndWorker, effects) if e.how is fx.How.TERMINATE]


def test_a_classic_script_has_spares_from_the_start() -> None:
    assert len(of(fx.SpawnWorker, Agent(CLASSIC).handle(ev.Started(), 0.0))) == 3


def test_classic_workers_that_have_run_are_asked_to_end_once_their_group_is_dissolved() -> None:
    agent = running_pair()
    assert not asked(agent.handle(ev.TimerFired(), 3.5))
    effects = agent.handle(dissolved(), 4.0)
    assert asked(effects) == ["a-1", "a-2"], "the spare has not run"
    assert len(of(fx.SpawnWorker, effects)) == 2, "fresh ones are forked meanwhile"
    assert not of(fx.AssignSlot, effects), "a slot is free when nobody runs there any more"
    assert not asked(agent.handle(ev.TimerFired(), 4.1)), "asked twice"
    effects = agent.handle(ev.WorkerExited(worker="a-2", exit_code=1), 4.2)
    assert not of(fx.ReportFailure, effects), "its end is no failure of its own"
    assert of(fx.AssignSlot, effects) == [fx.AssignSlot(worker="a-3", slot=1)]


def test_a_classic_member_that_has_not_begun_yet_is_ended_with_the_others() -> None:
    agent = serving(CLASSIC)
    for worker in ("a-1", "a-2"):
        agent.handle(reported(worker, WorkerPhase.SPARE), 1.0)
        agent.handle(reported(worker, WorkerPhase.READY), 1.0)
    agent.handle(ev.GenerationAnnounced(generation=generation(1, "a-1", "b-1")), 2.0)
    assert asked(agent.handle(dissolved(), 2.1)) == ["a-1"]


def test_a_classic_script_that_does_not_end_is_killed_after_the_grace() -> None:
    agent = running_pair()
    (timer,) = of(fx.SetTimer, agent.handle(dissolved(), 4.0))
    assert timer.at == 9.0
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 8.9))
    effects = agent.handle(ev.TimerFired(), 9.0)
    assert of(fx.EndWorker, effects) == [fx.EndWorker(worker=w) for w in ("a-1", "a-2")]
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 9.1))


def test_a_classic_script_that_failed_before_it_was_asked_to_end_is_reported() -> None:
    agent = running_pair()
    agent.handle(dissolved(), 4.0)
    raised = Failure(worker="a-1", kind=FailureKind.EXCEPTION, signature="s", message="no corpus")
    agent.handle(ev.WorkerReportedFailure(failure=raised), 4.1)
    effects = agent.handle(ev.WorkerExited(worker="a-1", exit_code=1), 4.2)
    assert [e.failure for e in of(fx.ReportFailure, effects)] == [raised]


def test_a_retired_worker_that_somebody_else_kills_is_reported() -> None:
    agent = running_pair()
    agent.handle(dissolved(), 4.0)
    effects = agent.handle(killed("a-1"), 4.1)
    assert [e.failure.worker for e in of(fx.ReportFailure, effects)] == ["a-1"]
    agent.handle(ev.TimerFired(), 9.0)  # kills the other one
    assert not of(fx.ReportFailure, agent.handle(killed("a-2"), 9.1))


def test_restarts_of_classic_scripts_are_not_spaced_out() -> None:
    agent = serving(replace(CLASSIC, slots=1))
    for worker in ("a-1", "a-2"):
        agent.handle(reported(worker, WorkerPhase.SPARE), 1.0)
    for number in range(1, 6):
        runs, spare, fresh = (f"a-{n}" for n in range(number, number + 3))
        agent.handle(ev.GenerationAnnounced(generation=generation(number, runs)), 5.0)
        agent.handle(reported(runs, WorkerPhase.TRAINING, generation=number), 5.0)
        effects = agent.handle(ev.WorkerExited(worker=runs, exit_code=1), 5.0)
        assert of(fx.ReportFailure, effects)
        assert of(fx.AssignSlot, effects) == [fx.AssignSlot(worker=spare, slot=0)]
        assert of(fx.SpawnWorker, effects) == [fx.SpawnWorker(worker=fresh)], "not at once"
        agent.handle(reported(fresh, WorkerPhase.SPARE), 5.0)


def test_a_signal_reaches_classic_scripts_at_once_and_no_worker_starts_after_it() -> None:
    agent = running_pair()
    effects = agent.handle(ev.LeaveRequested(exit_code=143, reason="SIGTERM"), 4.0)
    assert of(fx.AskToStop, effects)
    assert asked(effects) == ["a-1", "a-2"]
    for worker in ("a-1", "a-2"):
        effects = agent.handle(ev.WorkerExited(worker=worker, exit_code=0), 4.5)
        assert not of(fx.SpawnWorker, effects) + of(fx.AssignSlot, effects)
        assert not of(fx.ReportFailure, effects)


def test_classic_scripts_that_end_well_when_asked_are_dismissed_together() -> None:
    """One of them may host the store of their group."""
    agent = running_pair()
    agent.handle(ev.LeaveRequested(exit_code=143, reason="SIGTERM"), 4.0)
    assert not of(fx.DismissWorker, agent.handle(reported("a-1", WorkerPhase.FINISHED), 4.2))
    effects = agent.handle(reported("a-2", WorkerPhase.FINISHED), 4.5)
    assert of(fx.DismissWorker, effects) == [fx.DismissWorker(worker=w) for w in ("a-1", "a-2")]
    assert not of(fx.DismissWorker, agent.handle(ev.TimerFired(), 4.6))


def test_classic_scripts_get_their_grace_even_when_the_job_has_failed() -> None:
    agent = running_pair()
    effects = agent.handle(ev.JobEnded(exit_code=1), 4.0)
    assert asked(effects) == ["a-1", "a-2"]
    assert fx.EndWorker(worker="a-3") in effects
    (timer,) = of(fx.SetTimer, effects)
    assert timer.at == 9.0
    late = agent.handle(ev.TimerFired(), 9.0)
    assert {e.worker for e in of(fx.EndWorker, late)} >= {"a-1", "a-2"}


def compiled(worker: str, committed: int | None) -> ev.WorkerCompiled:
    return ev.WorkerCompiled(worker=worker, committed=committed)


def test_a_compilation_is_part_of_the_nodes_view_until_it_is_over() -> None:
    agent = full()
    (view,) = of(fx.ReportNode, agent.handle(compiled("a-1", 7), 3.0))
    assert [s.compiling for s in view.workers] == [7, None, None]
    assert not of(fx.ReportNode, agent.handle(compiled("a-1", 7), 3.2))
    (view,) = of(fx.ReportNode, agent.handle(reported("a-1", WorkerPhase.JOINING), 3.4))
    assert [s.compiling for s in view.workers] == [7, None, None]
    (view,) = of(fx.ReportNode, agent.handle(compiled("a-1", None), 3.6))
    assert [s.compiling for s in view.workers] == [None] * 3
    assert not of(fx.ReportNode, agent.handle(compiled("gone", 7), 3.8))


@pytest.mark.parametrize(("first_step_s", "ended_at"), [(50.0, 70.0), (0.0, None)])
def test_a_worker_that_compiles_before_its_first_group_gets_more_time(
    first_step_s: float, ended_at: float | None
) -> None:
    settings = AgentSettings(
        node="a", slots=1, spares=0, start_timeout_s=10.0, first_step_s=first_step_s
    )
    agent = serving(settings)
    agent.handle(reported("a-1", WorkerPhase.SPARE), 10.0)  # gets its slot
    for at in (12.0, 14.0, 19.0):
        agent.handle(compiled("a-1", 0), at)
    agent.handle(compiled("a-1", None), 19.5)
    effects = agent.handle(ev.TimerFired(), (ended_at or 1e6) - 0.1)
    assert not of(fx.EndWorker, effects)
    if ended_at is None:
        assert of(fx.SetTimer, effects) == [fx.SetTimer(at=None)]
        return
    assert of(fx.SetTimer, effects) == [fx.SetTimer(at=ended_at)]
    assert of(fx.EndWorker, agent.handle(ev.TimerFired(), ended_at))


def test_an_adopted_worker_that_compiles_gets_no_more_time_to_report() -> None:
    agent = Agent(replace(SETTINGS, start="2"))
    effects = agent.handle(ev.Started(workers=(("a-1", 11),)), 0.0)
    (before,) = of(fx.SetTimer, effects)
    (after,) = of(fx.SetTimer, agent.handle(compiled("a-1", 7), 1.0))
    assert after == before
