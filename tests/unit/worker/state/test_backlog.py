"""A worker keeps the records of its steps until they are known to be stored."""

from __future__ import annotations

from elastic.worker.state.backlog import LedgerBacklog, LedgerRecord


def record(step: int, generation: int = 1, run: str = "b") -> LedgerRecord:
    samples = {"epoch": 0, "start": step, "stop": step + 1}
    return LedgerRecord(step=step, run=run, generation=generation, world_size=2, **samples)


def test_stored_records_are_dropped() -> None:
    backlog = LedgerBacklog([record(0)])
    backlog.append(record(1))
    backlog.append(record(2))
    assert backlog.since(0) == [record(0), record(1), record(2)]
    assert backlog.since(2) == [record(2)]
    backlog.stored(1, "b", 1)
    assert backlog.since(0) == [record(1), record(2)]
    backlog.stored(0, "b", 1)
    backlog.stored(3, "b", 1)
    assert backlog.since(0) == []


def test_a_step_computed_again_is_kept_when_its_earlier_record_is_stored() -> None:
    backlog = LedgerBacklog([record(0), record(1, generation=2)])
    backlog.stored(2, "b", 1)
    assert backlog.since(0) == [record(1, generation=2)]
    backlog.stored(2, "b", 2)
    assert backlog.since(0) == []


def test_generations_of_an_earlier_run_are_not_compared_with_those_of_this_one() -> None:
    backlog = LedgerBacklog([record(0, generation=7, run="a"), record(1, generation=1)])
    backlog.stored(1, "b", 0)
    assert backlog.since(0) == [record(1, generation=1)]
    backlog.stored(2, "b", 1)
    assert backlog.since(0) == []


def test_since_returns_a_copy_of_the_records() -> None:
    backlog = LedgerBacklog([record(0)])
    backlog.since(0).clear()
    assert backlog.since(0) == [record(0)]
