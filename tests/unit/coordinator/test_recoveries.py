"""Every second of a recovery is accounted for, once."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.coordinator.incidents import Recoveries
from elastic.coordinator.leadership import UNKNOWN_COMMAND, Loss, Stored
from elastic.core.coordinator.effects import Lost
from elastic.core.membership import ChangeReason, Generation, Member
from elastic.v1 import job_pb2 as pb


def lost(at: float, *workers: str) -> Lost:
    return Lost(workers=workers, reason=ChangeReason.MEMBER_LOST, at=at)


def generation(number: int, leave_after: int | None = None, *members: Member) -> Generation:
    return Generation(
        number=number,
        incarnation="i",
        members=members,
        reason=ChangeReason.MEMBER_LOST,
        leave_after=leave_after,
    )


def member(worker: str) -> Member:
    return Member(worker=worker, node="n", slot=0, endpoint="e")


def reformed(number: int, out_s: float = 0.0) -> pb.Reformed:
    """A report of the first step of generation `number`.

    out_s: seconds that the member had been without a group; 0: it was never in one."""
    return pb.Reformed(
        worker="a",
        generation=number,
        committed=7,
        abort_s=0.5,
        join_s=0.25,
        sync_s=0.5,
        first_step_s=1.0,
        out_s=out_s,
    )


def answered(recoveries: Recoveries, lost_at: float, at: float) -> None:
    """Lose "b", and announce generation 2 without it."""
    recoveries.lost(lost(lost_at, "b"))
    recoveries.announced(generation(2), at)


def finished(recoveries: Recoveries, report: pb.Reformed, now: float) -> dict[str, Any]:
    record = recoveries.reformed(report, now)
    assert record is not None
    return record


def sum_of_phases(record: dict[str, Any]) -> float:
    """The sum of all phases but abort_s, which overlaps with the others."""
    return sum(v for n, v in record.items() if n.endswith("_s") and n not in ("total_s", "abort_s"))


def test_phases_add_up_to_the_total() -> None:
    recoveries = Recoveries()
    recoveries.sign(10.0)
    recoveries.sign(10.1)
    answered(recoveries, lost_at=10.5, at=10.75)
    record = recoveries.reformed(reformed(2), 14.0)
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
    assert list(recoveries.finished) == [record]


def test_waiting_for_workers_is_not_taken_for_a_slow_store() -> None:
    recoveries = Recoveries()
    answered(recoveries, lost_at=5.0, at=5.5)  # too few are left: the group is dissolved
    recoveries.announced(generation(3), 15.0)
    record = finished(recoveries, reformed(3), 17.0)
    assert (record["persist_s"], record["notify_s"]) == (0.5, 9.75)
    assert sum_of_phases(record) == pytest.approx(record["total_s"])


def test_a_recovery_without_an_earlier_sign_begins_with_the_decision() -> None:
    recoveries = Recoveries()
    answered(recoveries, lost_at=5.0, at=5.0)
    record = finished(recoveries, reformed(2), 8.0)
    assert (record["detect_s"], record["total_s"]) == (0.0, 3.0)


def test_a_second_loss_during_a_recovery_is_part_of_it() -> None:
    recoveries = Recoveries()
    recoveries.sign(1.0)
    answered(recoveries, lost_at=2.0, at=2.0)
    recoveries.sign(3.0)
    recoveries.lost(lost(4.0, "c"))
    assert recoveries.reformed(reformed(2), 4.5) is None
    recoveries.announced(generation(3), 5.0)
    assert recoveries.reformed(reformed(2), 5.5) is None
    record = finished(recoveries, reformed(3), 8.0)
    assert (record["lost"], record["generation"], record["total_s"]) == (["b", "c"], 3, 7.0)
    assert record["detect_s"] == 3.0
    assert sum_of_phases(record) == pytest.approx(7.0)
    assert recoveries.reformed(reformed(3), 9.0) is None
    assert len(recoveries.finished) == 1


def test_a_first_step_of_the_lost_group_does_not_end_its_recovery() -> None:
    """The report was on its way when the loss was noticed."""
    recoveries = Recoveries()
    recoveries.lost(lost(2.0, "b"))
    assert recoveries.reformed(reformed(1), 2.1) is None
    recoveries.announced(generation(2), 2.5)
    assert recoveries.reformed(reformed(1), 2.6) is None
    assert recoveries.reformed(reformed(2), 5.0) is not None


def test_a_group_lost_before_this_leader_led_is_counted_from_its_loss() -> None:
    recoveries = Recoveries(leads_since=20.0)
    answered(recoveries, lost_at=20.5, at=20.75)
    record = finished(recoveries, reformed(2, out_s=7.0), 24.0)
    assert (record["total_s"], record["detect_s"]) == (7.0, 3.5)
    assert sum_of_phases(record) == pytest.approx(7.0)


def test_a_loss_that_an_agent_reports_as_it_connects_is_counted_from_the_loss() -> None:
    """The leader led already, but nobody had noticed the loss."""
    recoveries = Recoveries(leads_since=20.0)
    recoveries.agent_connected(20.3)
    answered(recoveries, lost_at=20.5, at=20.5)
    record = finished(recoveries, reformed(2, out_s=0.75), 20.875)
    assert record["total_s"] == 0.75


LOSS = Loss(reason="member_lost", workers=("b",), incident=b"{}")


def stored(loss: Loss | None = LOSS) -> Stored:
    """Generation 2, whose only member is "a", as it is stored."""
    newest = generation(2, None, member("a"))
    return Stored(generation=newest, may_train=(), revision=1, command=UNKNOWN_COMMAND, loss=loss)


def test_a_recovery_that_an_earlier_leader_has_begun_is_finished() -> None:
    recoveries = Recoveries([{"generation": 1}], leads_since=20.0, last=stored())
    assert recoveries.under_way_since is None
    assert recoveries.loss(b"another") == LOSS
    assert recoveries.reformed(reformed(1), 20.0) is None
    report = reformed(2)
    assert recoveries.reformed(report, 20.0) is None  # a newcomer cannot say when the loss was
    report.out_s = 3.0
    record = finished(recoveries, report, 20.5)
    assert (record["generation"], record["reason"]) == (2, "member_lost")
    assert record["lost"] == ["b"]
    assert (record["total_s"], record["detect_s"]) == (3.0, 1.25)
    assert sum_of_phases(record) == pytest.approx(3.0)
    assert recoveries.reformed(report, 21.0) is None
    assert recoveries.finished[-1] == record
    assert recoveries.loss(b"") is None


@pytest.mark.parametrize(
    "recoveries",
    [
        Recoveries([{"generation": 2}], last=stored()),
        Recoveries(last=stored(loss=None)),
        Recoveries(),
    ],
    ids=["finished", "nobody was lost", "no group"],
)
def test_a_first_step_without_a_recovery_under_way_finishes_none(recoveries: Recoveries) -> None:
    assert recoveries.loss(b"") is None
    assert recoveries.reformed(reformed(2, out_s=3.0), 20.5) is None


def test_another_loss_under_the_next_leader_before_the_first_step_is_the_same_recovery() -> None:
    recoveries = Recoveries(leads_since=20.0, last=stored())
    recoveries.lost(lost(20.5, "c"))
    assert recoveries.reformed(reformed(2, out_s=3.0), 21.0) is None
    recoveries.announced(generation(3), 21.0)
    record = finished(recoveries, reformed(3), 22.0)
    assert record["lost"] == ["b", "c"]


def test_a_loss_under_this_leader_is_counted_from_its_first_sign() -> None:
    """A member may have noticed earlier, but its report is about its own process alone."""
    recoveries = Recoveries(leads_since=1.0)
    recoveries.sign(20.0)
    answered(recoveries, lost_at=20.5, at=20.75)
    record = finished(recoveries, reformed(2, out_s=7.0), 24.0)
    assert record["total_s"] == 4.0


def test_a_planned_change_is_no_recovery() -> None:
    recoveries = Recoveries()
    recoveries.announced(generation(2, leave_after=5), 1.0)
    assert recoveries.reformed(reformed(2), 2.0) is None
    assert not recoveries.finished


def test_an_old_sign_does_not_count_for_a_later_loss() -> None:
    """A generation has already answered what the sign was about."""
    recoveries = Recoveries()
    recoveries.sign(1.0)
    recoveries.announced(generation(2), 2.0)
    recoveries.lost(lost(100.0, "b"))
    recoveries.announced(generation(3), 100.0)
    record = finished(recoveries, reformed(3), 103.0)
    assert record["total_s"] == 3.0


@pytest.mark.parametrize(("workers", "detect_s"), [(["b", "c"], 0.0), (["c"], 90.0)])
def test_the_silence_of_a_node_is_a_sign_of_a_later_loss_only_if_it_lost_a_member(
    workers: list[str], detect_s: float
) -> None:
    """A node is silent, for example, while its agent restarts."""
    recoveries = Recoveries()
    current = generation(1, None, Member(worker="b", node="n@1", slot=0, endpoint="b:1"))
    recoveries.sign(10.0, silent="n@1")
    recoveries.reported("m@1", ["a"], current)
    recoveries.reported("n@1", workers, current)
    answered(recoveries, lost_at=100.0, at=100.0)
    record = finished(recoveries, reformed(2), 103.0)
    assert record["detect_s"] == detect_s


def test_only_the_newest_recoveries_are_kept() -> None:
    recoveries = Recoveries()
    for number in range(2, 60):
        recoveries.lost(lost(float(number), "b"))
        recoveries.announced(generation(number), float(number))
        recoveries.reformed(reformed(number), number + 3.0)
    assert [r["generation"] for r in recoveries.finished] == list(range(40, 60))


@pytest.mark.parametrize("planned", [True, False])
def test_a_recovery_after_a_late_leave_counts_from_the_last_commit(planned: bool) -> None:
    recoveries = Recoveries()
    before = generation(2, leave_after=7) if planned else generation(1)
    recoveries.announced(before, 86.0)
    recoveries.left_late(85.0, 100.0, before)
    if not planned:
        recoveries.sign(100.1)
        recoveries.lost(lost(100.5, "b"))
        recoveries.announced(generation(2), 100.5)
    assert recoveries.reformed(reformed(1), 101.0) is None
    record = finished(recoveries, reformed(2), 103.0)
    assert record["total_s"] == 18.0
    assert record["detect_s"] == (15.0 if planned else 15.5)
    assert record["reason"] == ("leave_timed_out" if planned else "member_lost")
    phases = ("detect_s", "persist_s", "notify_s", "join_s", "sync_s", "first_step_s")
    assert sum(record[phase] for phase in phases) == pytest.approx(18.0)
