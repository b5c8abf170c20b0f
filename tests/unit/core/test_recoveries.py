"""Every second of a recovery is accounted for, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from elastic.core.book.book import Book, FirstStep
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.phases import JobPhase
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    Member,
    WorkerPhase,
    WorkerStatus,
)

AHEAD_S = 1000.0


@dataclass
class Machine:
    phase: JobPhase = JobPhase.RUNNING
    current: Generation | None = None
    committed: int = 0
    committed_at: float = 0.0

    def last_commit_at(self, now: float) -> float:
        return min(now, self.committed_at)


class Leader:
    """The book of a leader, whose machine decides what the test says. Workers "a", "b" and "c"
    train at first."""

    def __init__(self, leads_since: float = 0.0) -> None:
        self.book = Book(3, leads_since=leads_since)
        self.machine = Machine(current=generation(1))
        self.tell(leads_since, ev.TimerFired())

    def tell(self, at: float, event: ev.Event, *effects: fx.Effect) -> None:
        self.book.observe(event, effects, self.machine, at)

    def sign(self, at: float) -> None:
        """A member's collective fails."""
        assert self.machine.current is not None
        number = self.machine.current.number
        self.reports(at, "a", ["a"], broken=True, generation=number)

    def reports(self, at: float, node: str, workers: Sequence[str], **more: Any) -> None:
        statuses = tuple(
            WorkerStatus(worker=w, phase=WorkerPhase.TRAINING, slot=0, **more) for w in workers
        )
        self.tell(at, ev.NodeReported(node=node, slots=1, workers=statuses))

    def lost(self, at: float, *workers: str) -> None:
        reason = ChangeReason.MEMBER_LOST
        self.tell(at, ev.TimerFired(), fx.Lost(workers=workers, reason=reason, at=at))

    def announced(self, at: float, group: Generation) -> None:
        self.machine.current = group
        persisted = ev.GenerationPersisted(number=group.number)
        self.tell(at, persisted, fx.AnnounceGeneration(generation=group))

    def answered(self, lost_at: float, at: float) -> None:
        """Lose "b", and announce generation 2 without it."""
        self.lost(lost_at, "b")
        self.announced(at, generation(2))

    def reformed(self, at: float, number: int, out_s: float = 0.0) -> dict[str, Any] | None:
        """A member has committed its first step of generation `number`. out_s: seconds that it had
        been without a group; 0: it was never in one."""
        step = FirstStep(
            generation=number,
            committed=7,
            abort_s=0.5,
            join_s=0.25,
            sync_s=0.5,
            first_step_s=1.0,
            out_s=out_s,
        )
        return self.book.reformed(step, at)

    def recovered(self, at: float, number: int, out_s: float = 0.0) -> dict[str, Any]:
        """Likewise; this ends a loss."""
        recovery = self.reformed(at, number, out_s)
        assert recovery is not None
        return recovery

    def next(self, leads_since: float, generation: int = 2) -> Leader:
        """The leader that has only what is stored."""
        leader = Leader(leads_since)
        documents = json.loads(json.dumps(self.book.documents(AHEAD_S)))
        found = {int(number): document for number, document in documents.items()}
        under_way = self.book.under_way
        decided = (generation, under_way.number) if under_way is not None else (0, 0)
        leader.book.resume(found, decided, AHEAD_S)
        return leader


def generation(number: int, leave_after: int | None = None, members: str = "abc") -> Generation:
    return Generation(
        number=number,
        incarnation="i",
        members=tuple(Member(worker=w, node=w, slot=0, endpoint="e") for w in members),
        reason=ChangeReason.MEMBER_LOST,
        leave_after=leave_after,
    )


def sum_of_phases(record: dict[str, Any]) -> float:
    """The sum of all phases but abort_s, which overlaps with the others."""
    return sum(v for n, v in record.items() if n.endswith("_s") and n not in ("total_s", "abort_s"))


def test_phases_add_up_to_the_total() -> None:
    leader = Leader()
    leader.sign(10.0)
    leader.sign(10.1)
    leader.answered(lost_at=10.5, at=10.75)
    record = leader.reformed(14.0, 2)
    assert record == {
        "generation": 2,
        "reason": "member_lost",
        "lost": ["b"],
        "committed": 7,
        "total_s": 4.0,
        "detect_s": 0.5,
        "persist_s": 0.25,
        "abort_s": 0.5,
        "join_s": 0.25,
        "sync_s": 0.5,
        "first_step_s": 1.0,
        "notify_s": 1.5,
    }
    assert sum_of_phases(record) == pytest.approx(record["total_s"])
    assert leader.book.recoveries() == [record]
    assert leader.next(20.0).book.recoveries() == [record]


def test_waiting_for_workers_is_not_taken_for_a_slow_store() -> None:
    leader = Leader()
    leader.lost(5.0, "b")  # too few are left: the group is dissolved
    leader.announced(5.5, generation(2, members=""))
    leader.announced(15.0, generation(3))
    record = leader.recovered(17.0, 3)
    assert (record["persist_s"], record["notify_s"]) == (0.5, 9.75)
    assert sum_of_phases(record) == pytest.approx(record["total_s"])


def test_a_recovery_without_an_earlier_sign_begins_with_the_decision() -> None:
    leader = Leader()
    leader.answered(lost_at=5.0, at=5.0)
    record = leader.recovered(8.0, 2)
    assert (record["detect_s"], record["total_s"]) == (0.0, 3.0)


def test_a_second_loss_during_a_recovery_is_part_of_it() -> None:
    leader = Leader()
    leader.sign(1.0)
    leader.answered(lost_at=2.0, at=2.0)
    leader.sign(3.0)
    leader.lost(4.0, "c")
    assert leader.reformed(4.5, 2) is None
    leader.announced(5.0, generation(3))
    assert leader.reformed(5.5, 2) is None
    record = leader.recovered(8.0, 3)
    assert (record["lost"], record["generation"], record["total_s"]) == (["b", "c"], 3, 7.0)
    assert record["detect_s"] == 3.0
    assert sum_of_phases(record) == pytest.approx(7.0)
    assert leader.reformed(9.0, 3) is None
    assert len(leader.book.recoveries()) == 1


def test_a_first_step_of_the_lost_group_does_not_end_its_recovery() -> None:
    """The report was on its way when the loss was noticed."""
    leader = Leader()
    leader.lost(2.0, "b")
    assert leader.reformed(2.1, 1) is None
    leader.announced(2.5, generation(2))
    assert leader.reformed(2.6, 1) is None
    assert leader.reformed(5.0, 2) is not None


def test_a_group_lost_before_this_leader_led_is_counted_from_its_loss() -> None:
    leader = Leader(leads_since=20.0)
    leader.answered(lost_at=20.5, at=20.75)
    record = leader.recovered(24.0, 2, out_s=7.0)
    assert (record["total_s"], record["detect_s"]) == (7.0, 3.5)
    assert sum_of_phases(record) == pytest.approx(7.0)


def test_a_loss_that_an_agent_reports_as_it_connects_is_counted_from_the_loss() -> None:
    """The leader led already, but nobody had noticed the loss."""
    leader = Leader(leads_since=20.0)
    leader.book.connected(20.3)
    leader.answered(lost_at=20.5, at=20.5)
    record = leader.recovered(20.875, 2, out_s=0.75)
    assert record["total_s"] == 0.75


def test_a_recovery_that_an_earlier_leader_has_begun_is_finished() -> None:
    first = Leader()
    first.answered(lost_at=17.5, at=17.5)
    leader = first.next(20.0)
    assert leader.reformed(20.0, 1) is None
    assert leader.reformed(20.0, 2) is None  # a newcomer cannot say when the loss was
    record = leader.recovered(20.5, 2, out_s=3.0)
    assert (record["generation"], record["reason"]) == (2, "member_lost")
    assert record["lost"] == ["b"]
    assert (record["total_s"], record["detect_s"]) == (3.0, 1.25)
    assert sum_of_phases(record) == pytest.approx(3.0)
    assert leader.reformed(21.0, 2, out_s=3.0) is None
    assert leader.book.recoveries() == [record]


def test_a_recovery_that_an_earlier_leader_has_begun_counts_from_the_first_sign_that_it_knew() -> (
    None
):
    first = Leader()
    first.sign(16.5)
    failure = Failure(worker="b", kind=FailureKind.SIGNAL)
    first.tell(16.75, ev.WorkerFailed(node="b", failure=failure))
    first.answered(lost_at=17.0, at=17.5)
    leader = first.next(20.0)
    record = leader.recovered(20.5, 2, out_s=3.0)
    assert record["total_s"] == 4.0
    assert sum_of_phases(record) == pytest.approx(4.0)
    assert leader.next(21.0).book.recoveries() == [record]


def test_a_recovery_that_an_earlier_leader_has_finished_is_not_finished_again() -> None:
    first = Leader()
    first.answered(lost_at=17.0, at=17.5)
    first.recovered(18.0, 2)
    assert first.next(20.0).reformed(20.5, 2, out_s=3.0) is None
    assert Leader().reformed(20.5, 2, out_s=3.0) is None


def test_another_loss_under_the_next_leader_before_the_first_step_is_the_same_recovery() -> None:
    first = Leader()
    first.answered(lost_at=17.0, at=17.5)
    leader = first.next(20.0)
    leader.lost(20.5, "c")
    assert leader.reformed(21.0, 2, out_s=3.0) is None
    leader.announced(21.0, generation(3))
    record = leader.recovered(22.0, 3)
    assert (record["lost"], record["total_s"]) == (["b", "c"], 5.0)


def test_a_loss_under_this_leader_is_counted_from_its_first_sign() -> None:
    """A member may have noticed earlier, but its report is about its own process alone."""
    leader = Leader(leads_since=1.0)
    leader.sign(20.0)
    leader.answered(lost_at=20.5, at=20.75)
    assert leader.recovered(24.0, 2, out_s=7.0)["total_s"] == 4.0


@pytest.mark.parametrize(("age_s", "total_s"), [(0.0, 3.5), (0.25, 3.75)])
def test_a_loss_is_counted_from_the_end_of_its_worker(age_s: float, total_s: float) -> None:
    leader = Leader()
    failure = Failure(worker="b", kind=FailureKind.SIGNAL)
    leader.tell(20.0, ev.WorkerFailed(node="b", failure=failure, age_s=age_s))
    leader.answered(lost_at=20.5, at=20.75)
    assert leader.recovered(23.5, 2)["total_s"] == total_s


def test_the_end_of_a_spare_is_no_sign_of_a_loss() -> None:
    leader = Leader()
    failure = Failure(worker="spare", kind=FailureKind.SIGNAL)
    leader.tell(20.0, ev.WorkerFailed(node="b", failure=failure))
    assert leader.book.under_way is None
    leader.answered(lost_at=20.5, at=20.75)
    assert leader.recovered(23.5, 2)["total_s"] == 3.0


def test_a_planned_change_is_no_recovery() -> None:
    leader = Leader()
    leader.announced(1.0, generation(2, leave_after=5))
    assert leader.reformed(2.0, 2) is None
    assert not leader.book.recoveries()


def test_an_old_sign_does_not_count_for_a_later_loss() -> None:
    """A generation has already answered what the sign was about."""
    leader = Leader()
    leader.sign(1.0)
    leader.announced(2.0, generation(2))
    leader.lost(100.0, "b")
    leader.announced(100.0, generation(3))
    assert leader.recovered(103.0, 3)["total_s"] == 3.0


def test_a_broken_group_is_a_sign_of_a_loss_only_in_the_newest_generation() -> None:
    leader = Leader()
    leader.announced(2.0, generation(2))
    leader.reports(3.0, "a", ["a"], broken=True, generation=1)
    leader.lost(100.0, "b")
    leader.announced(100.0, generation(3))
    assert leader.recovered(103.0, 3)["detect_s"] == 0.0


@pytest.mark.parametrize(("workers", "detect_s"), [(["b", "x"], 0.0), (["x"], 90.0)])
def test_the_silence_of_a_node_is_a_sign_of_a_later_loss_only_if_it_lost_a_member(
    workers: list[str], detect_s: float
) -> None:
    """A node is silent, for example, while its agent restarts."""
    leader = Leader()
    leader.tell(10.0, ev.NodeLost(node="b"))
    leader.reports(11.0, "a", ["a"])
    leader.reports(11.0, "b", workers)
    leader.answered(lost_at=100.0, at=100.0)
    assert leader.recovered(103.0, 2)["detect_s"] == detect_s


def test_only_the_newest_recoveries_are_kept() -> None:
    leader = Leader()
    for number in range(2, 60):
        leader.lost(float(number), "b")
        leader.announced(float(number), generation(number))
        leader.reformed(number + 3.0, number)
    assert [r["generation"] for r in leader.book.recoveries()] == list(range(40, 60))


@pytest.mark.parametrize("planned", [True, False])
def test_a_recovery_after_a_late_leave_counts_from_the_last_commit(planned: bool) -> None:
    leader = Leader()
    if planned:
        leader.announced(86.0, generation(2, leave_after=7))
    leader.machine.committed_at = 85.0
    leader.book.left_late("b", leader.machine, 100.0)
    if not planned:
        leader.sign(100.1)
        leader.answered(lost_at=100.5, at=100.5)
    assert leader.reformed(101.0, 1) is None
    record = leader.recovered(103.0, 2)
    assert record["total_s"] == 18.0
    assert record["detect_s"] == (15.0 if planned else 15.5)
    assert record["reason"] == ("leave_timed_out" if planned else "member_lost")
    assert sum_of_phases(record) == pytest.approx(18.0)
    (found,) = leader.book.documents(AHEAD_S).values()
    assert (found["cause"], found["nodes"][0]) == ("leave_timed_out", "b")


def test_a_loss_while_the_coordinator_did_not_run_is_counted_from_when_the_group_stood_still() -> (
    None
):
    leader = Leader()
    leader.book.stopped(6.0, at=20.3)
    leader.answered(lost_at=20.5, at=20.5)
    record = leader.recovered(24.0, 2, out_s=9.0)
    assert (record["total_s"], record["detect_s"]) == (9.0, 5.5)
    assert sum_of_phases(record) == pytest.approx(9.0)
