"""The ledger has each committed step of the surviving lineage once, whoever reports it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.ledger_file import LedgerFile
from elastic.errors import ConfigurationError
from elastic.v1 import job_pb2 as pb


def entries(steps: Iterable[int], generation: int = 1, run: str = "first") -> list[pb.LedgerEntry]:
    fields = {"run": run, "generation": generation, "world_size": 2}
    return [pb.LedgerEntry(step=s, start=8 * s, stop=8 * s + 8, **fields) for s in steps]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Iterator[LedgerFile]:
    ledger = LedgerFile(path, incarnation="first")
    yield ledger
    ledger.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def story(path: Path) -> list[object]:
    """Steps as (step, generation); other lines by their first key."""
    return [
        (line["step"], line["generation"]) if "step" in line else next(iter(line.items()))
        for line in lines(path)
    ]


def test_a_line_says_which_samples_a_step_used(ledger: LedgerFile, path: Path) -> None:
    assert ledger.append(entries([0, 1])).committed == 2
    assert lines(path)[0] == {"incarnation": "first"}
    assert lines(path)[-1] == {
        "step": 1,
        "epoch": 0,
        "run": "first",
        "generation": 1,
        "world_size": 2,
        "start": 8,
        "stop": 16,
    }


def test_nothing_reported_is_nothing_stored(ledger: LedgerFile) -> None:
    assert ledger.append([]).committed == 0


def test_what_is_reported_again_is_skipped(ledger: LedgerFile, path: Path) -> None:
    ledger.append(entries([0, 1, 2]))
    before = path.read_text()
    assert ledger.append(entries([1, 2])).committed == 3
    assert path.read_text() == before
    assert ledger.append([*entries([2]), *entries([3]), *entries([4], generation=2)]).committed == 5
    assert story(path)[-3:] == [(2, 1), (3, 1), (4, 2)]


def test_steps_that_were_lost_are_taken_back(ledger: LedgerFile, path: Path) -> None:
    ledger.append(entries(range(6)))
    assert ledger.append([*entries([2]), *entries([3, 4], generation=2)]).committed == 5
    assert story(path)[-3:] == [("resume", 3), (3, 2), (4, 2)]


def test_a_late_report_of_a_lineage_that_was_given_up_is_refused(
    ledger: LedgerFile, path: Path
) -> None:
    ledger.append(entries(range(4)))
    ledger.append(entries([2], generation=3))
    before = path.read_text()
    assert ledger.append(entries([3, 4], generation=1)).committed == 3
    assert path.read_text() == before


def test_a_run_that_begins_from_a_checkpoint(path: Path) -> None:
    """The first run had changed its group, and had stored more than its last checkpoint has."""
    ledger = LedgerFile(path, incarnation="first")
    ledger.append([*entries(range(2), generation=1), *entries([2, 3, 4], generation=5)])
    ledger.close()
    ledger = LedgerFile(path, incarnation="second")
    earlier = entries([1], generation=1) + entries([2], generation=5)  # not known to be stored
    stored = ledger.append(earlier)
    assert (stored.committed, stored.run, stored.generation) == (3, "second", 0)
    stored = ledger.append([*earlier, *entries([3, 4], generation=1, run="second")])
    assert (stored.committed, stored.run, stored.generation) == (5, "second", 1)
    ledger.append(entries([5], generation=2, run="second"))
    before = path.read_text()
    ledger.append(earlier)
    assert path.read_text() == before
    ledger.close()
    section = lines(path)[lines(path).index({"incarnation": "second"}) + 1 :]
    assert [(e.get("resume"), e.get("step"), e["run"], e["generation"]) for e in section] == [
        (1, None, "first", 1),
        (None, 1, "first", 1),
        (None, 2, "first", 5),
        (None, 3, "second", 1),
        (None, 4, "second", 1),
        (None, 5, "second", 2),
    ]


def test_a_run_that_begins_from_nothing_takes_back_all_that_is_there(path: Path) -> None:
    for run in ("first", "second"):
        ledger = LedgerFile(path, incarnation=run)
        ledger.append(entries(range(2), run=run))
        ledger.close()
    assert story(path)[4:] == [("incarnation", "second"), ("resume", 0), (0, 1), (1, 1)]


def test_a_new_leader_of_the_same_run_repeats_what_it_hears_again(path: Path) -> None:
    for steps in ([0, 1, 2], [2, 3]):
        ledger = LedgerFile(path, incarnation="first")
        ledger.append(entries(steps, generation=4))
        ledger.close()
    assert story(path)[5:] == [("incarnation", "first"), ("resume", 2), (2, 4), (3, 4)]


def test_what_append_has_counted_is_in_the_file(ledger: LedgerFile, path: Path) -> None:
    """Not in a buffer: members forget what they are told is stored."""
    stored = ledger.append(entries(range(3)))
    assert lines(path)[-1]["step"] == stored.committed - 1


def test_a_path_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing.*--ledger"):
        LedgerFile(tmp_path / "missing" / "ledger", incarnation="first")
    with pytest.raises(ConfigurationError, match="directory"):
        LedgerFile(tmp_path, incarnation="first")


def test_a_line_cut_short_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"incarnation": "a"}\n{"step": 0, "epo')
    LedgerFile(path, incarnation="b").close()
    assert path.read_text().splitlines()[2] == '{"incarnation": "b"}'
