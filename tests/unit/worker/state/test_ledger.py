"""A worker keeps the records of its steps until they are known to be stored."""

from __future__ import annotations

from elastic.worker.state.ledger import LedgerBacklog, LedgerRecord


def record(step: int, generation: int = 1) -> LedgerRecord:
    return LedgerRecord(
        step=step, epoch=0, generation=generation, world_size=2, start=step, stop=step + 1
    )


def test_what_is_stored_is_dropped() -> None:
    backlog = LedgerBacklog([record(0)])
    backlog.append(record(1))
    backlog.append(record(2))
    assert backlog.since(0) == [record(0), record(1), record(2)]
    assert backlog.since(2) == [record(2)]
    backlog.stored(1, 1)
    assert backlog.since(0) == [record(1), record(2)]
    backlog.stored(0, 1)
    backlog.stored(3, 1)
    assert backlog.since(0) == []


def test_a_step_computed_again_is_not_what_was_stored_of_it() -> None:
    backlog = LedgerBacklog([record(0), record(1, generation=2)])
    backlog.stored(2, 1)
    assert backlog.since(0) == [record(1, generation=2)]
    backlog.stored(2, 2)
    assert backlog.since(0) == []


def test_a_copy_of_the_records_is_handed_out() -> None:
    backlog = LedgerBacklog([record(0)])
    backlog.since(0).clear()
    assert backlog.since(0) == [record(0)]
