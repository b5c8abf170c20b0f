"""`TimeReports` chooses which figures of time are sent to the coordinator."""

from __future__ import annotations

from elastic.agent.worker_server import EVERY_S, TimeReports
from elastic.v1 import job_pb2 as pb


def spent(steps: int, generation: int = 1) -> pb.TimeSpent:
    return pb.TimeSpent(generation=generation, steps=steps)


def test_figures_are_sent_at_intervals_and_the_last_ones_when_the_worker_ends() -> None:
    sent: list[pb.WorkerTime] = []
    reports = TimeReports(sent.append)
    reports.heard("w1", spent(1), 0.0, told=False)
    reports.heard("w1", spent(2), EVERY_S / 2, told=False)
    assert not sent
    reports.heard("w1", spent(3), EVERY_S, told=False)
    reports.heard("w1", spent(4), EVERY_S + 1.0, told=False)
    assert [s.spent.steps for s in sent] == [3]
    reports.forget("w1", EVERY_S + 2.0)
    assert [s.spent.steps for s in sent] == [3, 4]
    reports.forget("w1", EVERY_S + 2.0)


def test_figures_that_were_sent_with_a_report_are_not_sent_again() -> None:
    sent: list[pb.WorkerTime] = []
    reports = TimeReports(sent.append)
    reports.heard("w1", spent(1), 100.0, told=True)
    reports.tell("w1", 200.0)
    reports.heard("w2", spent(0, generation=0), 0.0, told=False)
    reports.forget("w2", 300.0)
    assert not sent, "w2 was in no group"


def test_the_sums_by_which_ranks_are_compared_are_passed_on_once() -> None:
    sent: list[pb.WorkerPace] = []
    reports = TimeReports(lambda _: None, sent.append)
    reports.heard_pace("w1", pb.Pace(generation=1, committed=8))
    assert not sent, "a stranger's"
    reports.heard("w1", spent(8), 0.0, told=False)
    for committed in (8, 8, 16, 16, 16):
        reports.heard_pace("w1", pb.Pace(generation=1, committed=committed))
    reports.heard_pace("w1", pb.Pace(generation=2, committed=16))
    assert [(s.pace.generation, s.pace.committed) for s in sent] == [(1, 8), (1, 16), (2, 16)]
