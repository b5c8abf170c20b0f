"""An agent that finds the workers of an earlier one, that leaves the job, or that is cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.agent import effects as fx
from elastic.core.agent import events as ev
from elastic.core.agent.machine import Agent, AgentPhase, AgentSettings
from elastic.core.membership import Failure, FailureKind, WorkerPhase, WorkerStatus
from tests.unit.core.cluster_views import generation

SETTINGS = AgentSettings(node="a", slots=2, spares=1, start="s2")
FOUND = (("a-s1-1", 11), ("a-s1-2", 12), ("a-s1-3", 13))
LEAVE = ev.LeaveRequested(exit_code=143, reason="SIGTERM")


def adopting(settings: AgentSettings = SETTINGS) -> Agent:
    agent = Agent(settings)
    agent.handle(ev.Started(workers=FOUND), 0.0)
    return agent


def reported(worker: str, phase: WorkerPhase, slot: int | None = None) -> ev.WorkerReported:
    return ev.WorkerReported(status=WorkerStatus(worker=worker, phase=phase, slot=slot))


TRAINS = reported("a-s1-1", WorkerPhase.TRAINING, 1)
TRAINS_TOO = reported("a-s1-2", WorkerPhase.TRAINING, 0)
SPARE = reported("a-s1-3", WorkerPhase.SPARE)


def of(kind: type, effects: list[fx.Effect]) -> list[fx.Effect]:
    return [e for e in effects if isinstance(e, kind)]


def killed(worker: str) -> ev.WorkerExited:
    return ev.WorkerExited(worker=worker, exit_code=0, signal=9)


def view(effects: list[fx.Effect]) -> list[WorkerStatus]:
    (report,) = of(fx.ReportNode, effects)
    return list(report.workers)  # type: ignore[attr-defined]


def serving(settings: AgentSettings = SETTINGS) -> Agent:
    """An agent that has started its workers itself: two in slots and a spare."""
    agent = Agent(settings)
    agent.handle(ev.Started(), 0.0)
    for n in (1, 2, 3):
        agent.handle(reported(f"a-s2-{n}", WorkerPhase.SPARE), 1.0)
    for n in (1, 2):
        agent.handle(reported(f"a-s2-{n}", WorkerPhase.TRAINING), 2.0)
    return agent


def leaving(timeout_s: float = 60.0) -> Agent:
    """An agent that was asked to leave at 10 s."""
    agent = serving(replace(SETTINGS, leave_timeout_s=timeout_s))
    agent.handle(ev.GenerationAnnounced(generation=generation(1, "b1")), 9.0)
    assert of(fx.AskToLeave, agent.handle(LEAVE, 10.0)) == [fx.AskToLeave(reason="SIGTERM")]
    return agent


# ---- workers that are found alive


def test_an_agent_reports_and_starts_nothing_before_all_found_workers_have_reported() -> None:
    agent = Agent(SETTINGS)
    effects = agent.handle(ev.Started(workers=FOUND), 0.0)
    effects += agent.handle(SPARE, 1.0)
    effects += agent.handle(TRAINS, 1.1)
    assert not of(fx.ReportNode, effects)
    assert not of(fx.AssignSlot, effects)
    assert not of(fx.SpawnWorker, effects)
    effects = agent.handle(TRAINS_TOO, 1.2)
    assert [(s.worker, s.slot, s.phase) for s in view(effects)] == [
        ("a-s1-1", 1, WorkerPhase.TRAINING),
        ("a-s1-2", 0, WorkerPhase.TRAINING),
        ("a-s1-3", None, WorkerPhase.SPARE),
    ]
    assert [s.pid for s in view(effects)] == [11, 12, 13]
    assert not of(fx.AssignSlot, effects)
    assert not of(fx.SpawnWorker, effects)


def test_slots_of_adopted_workers_are_not_given_away() -> None:
    agent = adopting()
    for event in (TRAINS, TRAINS_TOO, SPARE):
        agent.handle(event, 1.0)
    assert of(fx.AssignSlot, agent.handle(killed("a-s1-2"), 2.0)) == [
        fx.AssignSlot(worker="a-s1-3", slot=0)
    ]


def test_a_found_worker_that_reports_late_is_sent_the_generation_that_it_has_missed() -> None:
    agent = Agent(SETTINGS)
    agent.handle(ev.Started(workers=FOUND[:2]), 0.0)
    agent.handle(TRAINS, 1.0)
    agent.handle(ev.TimerFired(), 2.0)  # the agent reports without a-s1-2
    newest = generation(5, "a0")
    effects = agent.handle(ev.GenerationAnnounced(generation=newest), 2.1)
    assert [e.worker for e in of(fx.ForwardGeneration, effects)] == ["a-s1-1"]  # type: ignore[attr-defined]
    late = replace(TRAINS_TOO.status, generation=4, acknowledged=4)
    effects = agent.handle(ev.WorkerReported(status=late), 2.5)
    assert of(fx.ForwardGeneration, effects) == [
        fx.ForwardGeneration(worker="a-s1-2", generation=newest)
    ]
    effects = agent.handle(ev.WorkerReported(status=replace(late, acknowledged=5)), 2.6)
    assert not of(fx.ForwardGeneration, effects)


def test_a_later_report_does_not_change_an_adopted_slot() -> None:
    agent = adopting()
    for event in (TRAINS, TRAINS_TOO, SPARE):
        agent.handle(event, 1.0)
    effects = agent.handle(reported("a-s1-1", WorkerPhase.READY, None), 3.0)
    assert view(effects)[0].slot == 1


def test_a_found_worker_that_dies_before_it_reports_is_not_waited_for() -> None:
    agent = adopting()
    agent.handle(TRAINS, 1.0)
    agent.handle(SPARE, 1.0)
    effects = agent.handle(killed("a-s1-2"), 1.5)
    assert [s.worker for s in view(effects)] == ["a-s1-1", "a-s1-3", "a-s2-1"]
    assert of(fx.AssignSlot, effects) == [fx.AssignSlot(worker="a-s1-3", slot=0)]
    assert of(fx.SpawnWorker, effects) == [fx.SpawnWorker(worker="a-s2-1")]
    (failed,) = of(fx.ReportFailure, effects)
    assert failed.failure.worker == "a-s1-2"  # type: ignore[attr-defined]


def test_a_found_worker_that_does_not_report_soon_counts_as_starting() -> None:
    """The worker was forked shortly before, and its script has not come to elastic.init() yet."""
    agent = adopting(replace(SETTINGS, start_timeout_s=30.0))
    agent.handle(SPARE, 0.5)
    effects = agent.handle(TRAINS, 0.5)
    (timer,) = of(fx.SetTimer, effects)
    soon = timer.at  # type: ignore[attr-defined]
    assert not of(fx.ReportNode, agent.handle(ev.TimerFired(), soon - 0.1))
    effects = agent.handle(ev.TimerFired(), soon)
    assert not of(fx.EndWorker, effects)
    phases = [s.phase for s in view(effects)]
    assert phases[:3] == [WorkerPhase.TRAINING, WorkerPhase.STARTING, WorkerPhase.SPARE]


def test_a_found_worker_that_never_reports_is_replaced_after_the_start_timeout() -> None:
    agent = adopting(replace(SETTINGS, start_timeout_s=30.0))
    agent.handle(TRAINS, 0.5)
    agent.handle(reported("a-s1-3", WorkerPhase.TRAINING, 0), 0.5)
    effects = agent.handle(ev.TimerFired(), 2.0)
    while not of(fx.EndWorker, effects):
        (timer,) = of(fx.SetTimer, effects)
        at = timer.at  # type: ignore[attr-defined]
        assert at is not None
        effects = agent.handle(ev.TimerFired(), at)
    assert at == 32.0
    assert of(fx.EndWorker, effects) == [fx.EndWorker(worker="a-s1-2", how=fx.How.DUMP_AND_KILL)]
    (failed,) = of(fx.ReportFailure, agent.handle(killed("a-s1-2"), 32.3))
    assert failed.failure.kind is FailureKind.START_TIMEOUT  # type: ignore[attr-defined]


def test_a_found_worker_that_prepares_gets_as_much_time_as_a_new_one() -> None:
    agent = adopting(replace(SETTINGS, slots=1, spares=0, start_timeout_s=30.0))
    agent.handle(killed("a-s1-2"), 0.5)
    agent.handle(killed("a-s1-3"), 0.5)
    agent.handle(reported("a-s1-1", WorkerPhase.PREPARING, 0), 1.0)
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 30.9))
    assert of(fx.EndWorker, agent.handle(ev.TimerFired(), 31.0))


def test_worker_names_omit_an_empty_start_token() -> None:
    agent = Agent(replace(SETTINGS, start=""))
    started = of(fx.SpawnWorker, agent.handle(ev.Started(), 0.0))
    assert started == [fx.SpawnWorker(worker="a-1"), fx.SpawnWorker(worker="a-2")]


# ---- leaving


def test_a_node_that_may_not_leave_alone_asks_the_job_to_stop() -> None:
    effects = serving().handle(LEAVE, 10.0)
    assert of(fx.AskToStop, effects) == [fx.AskToStop(exit_code=143, reason="SIGTERM")]
    assert not of(fx.AskToLeave, effects)


def test_a_node_that_leaves_ends_when_it_is_drained() -> None:
    agent = leaving()
    assert agent.phase is AgentPhase.SERVING
    effects = agent.handle(ev.Drained(), 12.0)
    assert [e.worker for e in of(fx.EndWorker, effects)] == ["a-s2-1", "a-s2-2", "a-s2-3"]  # type: ignore[attr-defined]
    for n in (1, 2):
        assert not of(fx.ExitAgent, agent.handle(killed(f"a-s2-{n}"), 12.1))
    effects = agent.handle(killed("a-s2-3"), 12.2)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]
    assert not of(fx.ReportFailure, effects)


@pytest.mark.parametrize("adopts", [False, True])
def test_a_node_that_knows_no_group_leaves_at_once_unless_it_found_workers(adopts: bool) -> None:
    settings = replace(SETTINGS, leave_timeout_s=60.0)
    agent = adopting(settings) if adopts else serving(settings)
    effects = agent.handle(LEAVE, 1.5)
    assert bool(of(fx.AskToLeave, effects)) == adopts
    assert len(of(fx.EndWorker, effects)) == (0 if adopts else 3)


def test_a_node_that_is_not_drained_in_time_ends_and_reports_the_timeout_once() -> None:
    agent = leaving(timeout_s=60.0)
    (timer,) = of(fx.SetTimer, agent.handle(ev.TimerFired(), 11.0))
    assert timer.at == 70.0  # type: ignore[attr-defined]
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 69.9))
    effects = agent.handle(ev.TimerFired(), 70.5)
    assert len(of(fx.EndWorker, effects)) == 3
    assert of(fx.TellLeaveTimedOut, effects) == [fx.TellLeaveTimedOut(waited_s=60.5)]
    assert not of(fx.TellLeaveTimedOut, agent.handle(ev.TimerFired(), 71.0)), "told once"


def test_a_node_that_is_drained_in_time_reports_no_timeout() -> None:
    agent = leaving(timeout_s=60.0)
    agent.handle(ev.Drained(), 69.0)
    assert not of(fx.TellLeaveTimedOut, agent.handle(ev.TimerFired(), 70.5))


def test_a_repeated_request_to_leave_is_passed_on_and_gives_no_more_time() -> None:
    agent = leaving(timeout_s=60.0)
    later = ev.LeaveRequested(exit_code=130, reason="Ctrl-C")
    assert of(fx.AskToLeave, agent.handle(later, 40.0)) == [fx.AskToLeave(reason="Ctrl-C")]
    agent.handle(ev.TimerFired(), 70.0)
    for n in (1, 2, 3):
        effects = agent.handle(killed(f"a-s2-{n}"), 71.0)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]


def test_a_second_signal_ends_the_workers_of_a_node_that_leaves() -> None:
    assert len(of(fx.EndWorker, leaving().handle(ev.StopRequested(exit_code=130), 11.0))) == 3


def test_a_node_that_an_operator_drains_ends_after_the_same_timeout() -> None:
    agent = serving(replace(SETTINGS, leave_timeout_s=60.0))
    (timer,) = of(fx.SetTimer, agent.handle(ev.DrainRequested(), 10.0))
    assert timer.at == 70.0  # type: ignore[attr-defined]
    agent.handle(ev.DrainRequested(), 40.0)  # the next leader repeats the request
    effects = agent.handle(ev.TimerFired(), 70.0)
    assert len(of(fx.EndWorker, effects)) == 3
    assert of(fx.TellLeaveTimedOut, effects) == [fx.TellLeaveTimedOut(waited_s=60.0)]
    for n in (1, 2, 3):
        effects = agent.handle(killed(f"a-s2-{n}"), 71.0)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=80)]


def test_a_drain_that_is_called_off_ends_no_worker() -> None:
    agent = serving(replace(SETTINGS, leave_timeout_s=60.0))
    agent.handle(ev.DrainRequested(), 10.0)
    (timer,) = of(fx.SetTimer, agent.handle(ev.DrainRequested(called_off=True), 11.0))
    assert timer.at is None  # type: ignore[attr-defined]
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 70.0))


def test_a_drain_of_a_node_that_may_not_leave_alone_ends_no_worker() -> None:
    agent = serving()
    agent.handle(ev.DrainRequested(), 10.0)
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 1000.0))


def test_a_drained_node_exits_with_the_code_of_its_own_request_or_of_the_drain() -> None:
    for own, code in ((None, 81), (143, 143)):
        agent = serving(replace(SETTINGS, leave_timeout_s=60.0))
        if own is not None:
            agent.handle(ev.LeaveRequested(exit_code=own, reason="SIGTERM"), 9.0)
        agent.handle(ev.Drained(exit_code=81), 10.0)
        for n in (1, 2, 3):
            effects = agent.handle(killed(f"a-s2-{n}"), 10.1)
        assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=code)]


@pytest.mark.parametrize("started", [False, True])
def test_a_node_without_workers_exits_at_once_when_asked_to_leave(started: bool) -> None:
    agent = Agent(replace(SETTINGS, slots=0, spares=0, leave_timeout_s=60.0))
    if started:
        agent.handle(ev.Started(), 0.0)
    effects = agent.handle(LEAVE, 1.0)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]


# ---- asked to leave before it knows which workers an earlier agent has left

LEAVES_IN_60_S = replace(SETTINGS, leave_timeout_s=60.0)


def searching(settings: AgentSettings = LEAVES_IN_60_S) -> Agent:
    """An agent that looks for the zygote of an earlier one."""
    agent = Agent(settings)
    assert not agent.handle(ev.SearchStarted(), 0.0)
    return agent


def test_an_agent_that_may_find_workers_leaves_with_them_once_they_are_known() -> None:
    agent = searching()
    assert agent.handle(LEAVE, 0.1) == [fx.SetTimer(at=60.1)]
    effects = agent.handle(ev.Started(workers=FOUND), 0.5)
    assert of(fx.AskToLeave, effects) == [fx.AskToLeave(reason="SIGTERM")]
    assert not of(fx.EndWorker, effects) + of(fx.ExitAgent, effects)
    for event in (TRAINS, TRAINS_TOO, SPARE):
        effects = agent.handle(event, 0.6)
        assert not of(fx.EndWorker, effects) + of(fx.AskToLeave, effects)
    assert len(view(effects)) == 3
    assert len(of(fx.EndWorker, agent.handle(ev.Drained(), 1.0))) == 3
    for worker, _ in FOUND:
        effects = agent.handle(killed(worker), 1.1)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]


def test_found_workers_get_the_time_to_leave_from_the_request_on() -> None:
    agent = searching()
    agent.handle(LEAVE, 0.1)
    agent.handle(ev.Started(workers=FOUND), 5.0)
    for event in (TRAINS, TRAINS_TOO, SPARE):
        agent.handle(event, 5.1)
    assert not of(fx.EndWorker, agent.handle(ev.TimerFired(), 60.0))
    assert len(of(fx.EndWorker, agent.handle(ev.TimerFired(), 60.1))) == 3


@pytest.mark.parametrize("answer", [ev.NothingFound(), ev.Started()], ids=["none", "no workers"])
def test_an_agent_that_finds_no_worker_leaves_at_once(answer: ev.Event) -> None:
    agent = searching()
    agent.handle(LEAVE, 0.1)
    effects = agent.handle(answer, 0.5)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]


def test_an_agent_that_finds_nothing_leaves_at_once_when_asked_later() -> None:
    agent = searching()
    agent.handle(ev.NothingFound(), 0.1)
    assert agent.phase is AgentPhase.WARMING
    effects = agent.handle(LEAVE, 0.5)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]


def test_a_second_signal_ends_the_search_at_once() -> None:
    agent = searching()
    agent.handle(LEAVE, 0.1)
    effects = agent.handle(ev.StopRequested(exit_code=130), 0.5)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=130)]
    effects = agent.handle(ev.Started(workers=FOUND), 0.6)
    assert not of(fx.AskToLeave, effects)
    assert len(of(fx.EndWorker, effects)) == 3


def test_a_search_without_an_answer_ends_when_the_time_to_leave_is_over() -> None:
    agent = searching()
    agent.handle(LEAVE, 0.1)
    assert not of(fx.ExitAgent, agent.handle(ev.TimerFired(), 60.0))
    effects = agent.handle(ev.TimerFired(), 60.1)
    assert of(fx.TellLeaveTimedOut, effects) == [fx.TellLeaveTimedOut(waited_s=60.0)]
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=143)]


def test_a_classic_script_that_is_found_while_the_node_leaves_is_asked_to_end() -> None:
    agent = searching(replace(LEAVES_IN_60_S, classic=True))
    agent.handle(LEAVE, 0.1)
    effects = agent.handle(ev.Started(workers=FOUND), 0.5)
    assert not of(fx.EndWorker, effects)
    for event in (TRAINS, TRAINS_TOO):
        effects = agent.handle(event, 0.6)
        worker = event.status.worker
        asked = [fx.EndWorker(worker=worker, how=fx.How.TERMINATE)]
        assert of(fx.EndWorker, effects) == asked
    assert not of(fx.EndWorker, agent.handle(SPARE, 0.7))


# ---- cut off


def test_an_agent_that_is_cut_off_replaces_all_of_its_workers() -> None:
    agent = serving()
    effects = agent.handle(ev.CutOff(silent_s=31.4), 50.0)
    dumped = [fx.EndWorker(worker=f"a-s2-{n}", how=fx.How.DUMP_AND_KILL) for n in (1, 2, 3)]
    assert of(fx.EndWorker, effects) == dumped
    assert not of(fx.EndWorker, agent.handle(ev.CutOff(silent_s=32.0), 50.6))
    effects = agent.handle(killed("a-s2-1"), 50.7)
    failure: Failure = of(fx.ReportFailure, effects)[0].failure  # type: ignore[attr-defined]
    assert failure.kind is FailureKind.LEFT_OUT
    assert "for 31 s" in failure.message
    assert of(fx.SpawnWorker, effects) == [fx.SpawnWorker(worker="a-s2-4")]


def test_an_agent_that_is_cut_off_ends_found_workers_that_have_not_reported() -> None:
    assert len(of(fx.EndWorker, adopting().handle(ev.CutOff(silent_s=31.4), 1.0))) == 3


def test_a_worker_that_reports_too_late_for_its_slot_is_replaced() -> None:
    agent = adopting()
    for report in (TRAINS_TOO, SPARE):
        agent.handle(report, 0.1)
    agent.handle(ev.TimerFired(), 2.0)  # its slot goes to the spare
    assert of(fx.EndWorker, agent.handle(TRAINS, 3.0)) == [
        fx.EndWorker(worker="a-s1-1", how=fx.How.DUMP_AND_KILL)
    ]


def test_a_worker_that_reports_late_keeps_a_slot_that_is_still_free() -> None:
    agent = adopting(replace(SETTINGS, spares=0))
    agent.handle(TRAINS_TOO, 0.1)
    agent.handle(killed("a-s1-3"), 0.2)
    agent.handle(ev.TimerFired(), 2.0)
    effects = agent.handle(TRAINS, 3.0)
    assert not of(fx.EndWorker, effects)
    assert {s.worker: s.slot for s in view(effects)}["a-s1-1"] == 1


def test_a_drained_node_exits_as_drained_even_if_the_job_ends_meanwhile() -> None:
    agent = serving(replace(SETTINGS, leave_timeout_s=60.0))
    agent.handle(ev.DrainRequested(), 10.0)
    agent.handle(ev.JobEnded(exit_code=143), 11.0)
    for n in (1, 2, 3):
        effects = agent.handle(killed(f"a-s2-{n}"), 11.1)
    assert of(fx.ExitAgent, effects) == [fx.ExitAgent(exit_code=80)]


def test_a_strayed_agent_ends_its_workers_and_accepts_lower_generation_numbers() -> None:
    agent = serving()
    agent.handle(ev.GenerationAnnounced(generation=generation(57, "b1")), 9.0)
    ended = of(fx.EndWorker, agent.handle(ev.IncarnationSuperseded(), 10.0))
    assert len(ended) == 3
    assert agent.generation is None
    agent.handle(ev.GenerationAnnounced(generation=generation(1, "c1")), 11.0)
    assert agent.generation == generation(1, "c1")


def test_an_agent_knows_the_group_that_trains_until_a_planned_change_takes_effect() -> None:
    agent = serving()
    first, later = generation(1, "b1"), generation(3, "b1")
    planned = replace(generation(2, "b1"), leave_after=9, provisional=True)
    settled = replace(planned, provisional=False)
    for announced, before in (
        (first, None),
        (planned, first),
        (settled, first),
        (later, None),
    ):
        agent.handle(ev.GenerationAnnounced(generation=announced), 9.0)
        assert (agent.generation, agent.before) == (announced, before)
