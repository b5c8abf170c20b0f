"""Which figures of time reach the coordinator."""

from __future__ import annotations

from elastic.agent.time_reports import EVERY_S, TimeReports
from elastic.v1 import job_pb2 as pb


def spent(steps: int, generation: int = 1) -> pb.TimeSpent:
    return pb.TimeSpent(generation=generation, steps=steps)


def test_now_and_then_is_often_enough_and_the_last_ones_are_told() -> None:
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


def test_what_has_gone_with_a_report_is_not_told_again() -> None:
    sent: list[pb.WorkerTime] = []
    reports = TimeReports(sent.append)
    reports.heard("w1", spent(1), 100.0, told=True)
    reports.tell("w1", 200.0)
    reports.heard("w2", spent(0, generation=0), 0.0, told=False)
    reports.forget("w2", 300.0)
    assert not sent, "w2 was in no group"
