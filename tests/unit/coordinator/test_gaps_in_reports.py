"""A new coordinator stores nothing before a member has sent all that the one before did not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.coordinator.ledger_file import LedgerFile
from elastic.v1 import job_pb2, local_pb2
from tests.unit.coordinator.test_hearing import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    ledger = LedgerFile(tmp_path / "ledger.jsonl", incarnation="i")
    yield Place(ledger)
    ledger.close()


def entries(*steps: int, whole: bool = False) -> local_pb2.LedgerEntries:
    rows = [job_pb2.LedgerEntry(step=s, run="i", generation=3, start=s, stop=s + 1) for s in steps]
    return local_pb2.LedgerEntries(entries=rows, whole=whole)


def stored(tmp_path: Path) -> list[int]:
    lines = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "step" in line]


def test_what_a_member_says_before_it_has_heard_of_us_is_said_again(
    place: Place, tmp_path: Path
) -> None:
    place.hear(ledger=entries(7))  # 5 and 6 were sent when nobody led
    assert place.told == []
    place.hear(ledger=entries(5, 6, 7, whole=True))
    place.hear(ledger=entries(8))
    assert stored(tmp_path) == [5, 6, 7, 8]
    assert [told["ledger_stored"].committed for told in place.told] == [8, 9]


def test_another_stream_of_the_same_node_may_have_gaps_again(place: Place, tmp_path: Path) -> None:
    place.hear(ledger=entries(0, whole=True))
    place.node = place._arrived()
    place.hear(ledger=entries(2))
    place.hear(ledger=entries(1, 2, 3, whole=True))
    assert stored(tmp_path) == [0, 1, 2, 3]
