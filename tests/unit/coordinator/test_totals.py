"""The totals of a job go on from leader to leader."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given

from elastic.coordinator.totals import PHASES, SLOW_RECOVERY_S, Totals
from elastic.core.histogram import STEP_BOUNDS_S, Histogram
from elastic.runtime.journal import Entry
from elastic.v1 import job_pb2 as pb
from tests.fuzzed_documents import documents, thoroughly

RECOVERED = {"reason": "member_lost", "total_s": 0.2, **{f"{phase}_s": 0.01 for phase in PHASES}}
SAVED = {"step": 5, "bytes": 100, "stall_s": 0.1, "save_s": 2.0}


def tell(totals: Totals, name: str, /, **fields: Any) -> None:
    totals(Entry(unix_s=50.0, name=name, fields=fields))


def progress(worker: str, committed: int, *durations_s: float, samples: int = 0) -> pb.Progress:
    histogram = Histogram(STEP_BOUNDS_S)
    for duration_s in durations_s:
        histogram.observe(duration_s)
    return pb.Progress(
        worker=worker,
        committed=committed,
        samples=samples,
        step_s=0.1,
        samples_per_s=80.0,
        step_counts=histogram.counts,
        steps_total_s=histogram.total,
    )


def some() -> Totals:
    totals = Totals()
    totals.progressed(progress("w0", 4, 0.1, samples=32), 100.0)
    totals.progressed(progress("w0", 6, 0.1, 0.2, 0.2, samples=48), 101.0)
    tell(totals, "worker_failed", kind="signal")
    tell(totals, "recovered", **RECOVERED)
    tell(totals, "checkpoint_committed", **SAVED)
    return totals


def test_events_are_counted_by_their_kind_or_reason() -> None:
    totals = some()
    tell(totals, "worker_failed", kind="signal")
    tell(totals, "worker_failed", kind="exception")
    tell(totals, "progress", step=7)
    tell(totals, "node_lost", node="a", as_wanted=True)
    assert totals.events == {
        ("worker_failed", "signal"): 2,
        ("worker_failed", "exception"): 1,
        ("recovered", "member_lost"): 1,
        ("checkpoint_committed", ""): 1,
    }
    assert sum(totals.recoveries["member_lost"].counts) == 1
    assert all(sum(h.counts) == 1 for h in totals.phases.values())
    assert (totals.checkpoint_bytes, totals.last_checkpoint_unix_s) == (100, 50.0)
    assert (totals.saves.total, totals.save_stalls.total) == (2.0, 0.1)


def test_committed_steps_and_lost_steps_are_each_counted_once() -> None:
    totals = some()
    assert (totals.steps_committed, totals.steps_lost, totals.committed) == (6, 0, 6)
    assert totals.last_commit_unix_s == 101.0
    totals.progressed(progress("w1", 2), 110.0)
    assert (totals.steps_committed, totals.steps_lost, totals.committed) == (6, 4, 2)
    assert totals.last_commit_unix_s == 101.0
    totals.progressed(progress("w1", 5), 111.0)
    assert (totals.steps_committed, totals.steps_lost, totals.committed) == (9, 4, 5)


def test_steps_are_lost_only_when_a_group_has_committed_one_without_them() -> None:
    def first(committed: int, generation: int) -> pb.Progress:
        report = progress("w1", committed)
        report.generation, report.first_step = generation, True
        return report

    totals = some()
    totals.progressed(first(2, 3), 110.0)
    totals.progressed(progress("w0", 7), 111.0)  # a member that held all of them has come back
    assert (totals.steps_committed, totals.steps_lost, totals.committed) == (7, 0, 7)
    totals.progressed(first(2, 5), 112.0)
    report = progress("w1", 9)
    report.generation = 5
    totals.progressed(report, 113.0)
    assert (totals.steps_committed, totals.steps_lost, totals.committed) == (14, 5, 9)


def test_the_last_commit_is_when_the_step_under_way_began() -> None:
    totals, report = Totals(), progress("w0", 4)
    report.in_step_s = 7.0
    totals.progressed(report, 100.0)
    assert totals.last_commit_unix_s == 93.0


def test_durations_are_those_since_the_last_report_of_the_same_process() -> None:
    totals = some()
    assert (sum(totals.steps.counts), totals.steps.total) == (2, pytest.approx(0.4))
    totals.progressed(progress("w1", 7, *[0.3] * 9, samples=500), 102.0)
    assert sum(totals.steps.counts) == 2, "w1 has counted what w0 has told"
    assert totals.samples == 16 + 32 + 8, "of the first report of each, what its steps usually have"
    totals.progressed(progress("w1", 9, *[0.3] * 11, samples=516), 103.0)
    assert sum(totals.steps.counts) == 4
    assert totals.samples == 56 + 16


def test_steps_that_were_not_reported_count_as_many_samples_as_the_newest_step() -> None:
    """A step that lasts longer than usual has no more samples for that."""
    totals, report = Totals(), progress("w0", 256, samples=2048)
    report.global_batch, report.step_s = 8, 0.2
    totals.progressed(report, 100.0)
    assert totals.samples == 2048


def test_recomputed_steps_are_counted_once_however_many_members_report_them() -> None:
    totals = Totals()
    for generation, recomputed in ((1, 0), (2, 1), (2, 1), (3, 0), (4, 1)):
        totals.reformed(pb.Reformed(generation=generation, recomputed=recomputed))
    assert totals.steps_recomputed == 2


def test_a_roll_back_of_the_store_is_known_by_its_time_under_the_next_leader() -> None:
    """A counter says nothing: the leader that finds it has just begun, with lost totals."""
    first, second = Totals(), Totals()
    assert first.last_roll_back_unix_s == 0.0
    tell(first, "store_rolled_back", generation=3, stored=0)
    assert first.last_roll_back_unix_s > 0.0
    document = json.loads(json.dumps(first.to_document()))
    second.adopt(document)
    assert second.last_roll_back_unix_s == first.last_roll_back_unix_s
    del document["instants"]["last_roll_back_unix_s"]  # as of an older version
    third = Totals()
    third.adopt(document)
    assert (third.weight, third.last_roll_back_unix_s) == (1, 0.0)


def test_a_leader_that_led_before_knows_the_instants_of_those_between() -> None:
    """The store was emptied, so the totals of the leader between have fewer events."""
    own, between = some(), Totals()
    tell(between, "store_rolled_back", generation=3, stored=0)
    between.last_commit_unix_s, between.last_checkpoint_unix_s = 2000.0, 1900.0
    committed, weight = own.steps_committed, own.weight
    own.adopt(json.loads(json.dumps(between.to_document())))
    assert own.last_roll_back_unix_s == between.last_roll_back_unix_s > 0.0
    assert (own.last_commit_unix_s, own.last_checkpoint_unix_s) == (2000.0, 1900.0)
    assert (own.steps_committed, own.weight) == (committed, weight)
    later = Totals()
    later.last_commit_unix_s = 3000.0
    later.adopt(json.loads(json.dumps(own.to_document())))
    assert later.last_commit_unix_s == 3000.0
    assert later.steps_committed == committed


def test_a_slow_recovery_is_known_by_its_time() -> None:
    totals = some()
    assert totals.last_slow_recovery_unix_s == 0.0
    tell(totals, "recovered", **{**RECOVERED, "total_s": SLOW_RECOVERY_S + 0.5})
    assert totals.last_slow_recovery_unix_s == 50.0


def test_the_next_leader_continues_the_totals() -> None:
    first, second = some(), Totals()
    second.adopt(json.loads(json.dumps(first.to_document())))
    assert second.to_document() == first.to_document()
    second.progressed(progress("w0", 8, 0.1, samples=64), 105.0)
    assert second.steps_committed == 8, "those that were not kept are known by their number"
    tell(second, "worker_failed", kind="signal")
    assert second.events["worker_failed", "signal"] == 2


def test_adopting_empty_totals_changes_nothing() -> None:
    totals = some()
    totals.adopt({})
    totals.adopt(Totals().to_document())
    assert totals.to_document() == some().to_document()


@thoroughly
@given(value=documents(json.dumps(some().to_document()).encode()))
def test_a_leader_can_begin_with_any_stored_totals(value: bytes) -> None:
    totals = Totals()
    with contextlib.suppress(ValueError, RecursionError):
        totals.adopt(json.loads(value))
    json.dumps(totals.to_document(), allow_nan=False)
    totals.copy()
