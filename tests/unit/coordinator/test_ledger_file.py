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


def entries(steps: Iterable[int], generation: int = 1) -> list[pb.LedgerEntry]:
    return [
        pb.LedgerEntry(step=s, generation=generation, world_size=2, start=8 * s, stop=8 * s + 8)
        for s in steps
    ]


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


def test_a_job_that_goes_on_from_a_checkpoint(path: Path) -> None:
    for incarnation, first in (("first", 0), ("second", 3)):
        ledger = LedgerFile(path, incarnation=incarnation)
        ledger.append(entries(range(first, first + 2)))
        ledger.close()
    assert story(path) == [
        ("incarnation", "first"),
        ("resume", 0),
        (0, 1),
        (1, 1),
        ("incarnation", "second"),
        ("resume", 3),
        (3, 1),
        (4, 1),
    ]


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
