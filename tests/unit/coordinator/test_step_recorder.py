"""Steps are written off the event loop, and a disk that fails costs neither the job nor a step."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.connected_agents import ConnectedNode
from elastic.coordinator.step_recorder import LedgerFile, StepRecorder
from elastic.errors import ConfigurationError
from elastic.v1 import job_pb2, local_pb2
from tests.unit.coordinator.agents import Diary, arrived

DEADLINE_S = 20.0


class Disk(LedgerFile):
    """A ledger whose disk is full, or does not answer, as the test says."""

    full = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, incarnation="i")
        self.answers = threading.Event()
        self.answers.set()
        self.appends = 0
        self.threads: set[str] = set()

    def open(self) -> None:
        self._wait()
        super().open()

    def append(self, entries: Any) -> local_pb2.LedgerStored:
        self.appends += 1
        self._wait()
        return super().append(entries)

    def _wait(self) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.answers.wait(DEADLINE_S)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


class Place:
    """A recorder and one node that reports to it."""

    def __init__(
        self,
        path: Path,
        most_waiting: int = 100,
        *,
        is_required: bool = True,
        newest_group: int = 0,
    ) -> None:
        self.disk, self.diary = Disk(path), Diary()
        self.node = arrived()
        self.told: list[local_pb2.LedgerStored] = []
        self.leads = True
        self.recorder = StepRecorder(
            self.disk,
            self.diary.journal,
            name="ledger",
            broadcast=lambda ledger_stored: self.told.append(ledger_stored),
            may_record=lambda: self.leads,
            is_required=is_required,
            newest_group=newest_group,
            most_waiting=most_waiting,
            retry_s=0.01,
        )

    def hear(self, *steps: int, whole: bool = False, node: ConnectedNode | None = None) -> None:
        self.recorder.take(node or self.node, entries(*steps).entries, whole=whole)

    def steps(self) -> list[int]:
        lines = [json.loads(line) for line in self.disk.path.read_text().splitlines()]
        return [line["step"] for line in lines if "step" in line]

    def stored(self) -> int:
        """The number of steps that members were told are stored."""
        return max((t.committed for t in self.told), default=0)

    def asked_again(self) -> int:
        return sum(t.send_again for t in self.told)

    async def until(self, condition: Callable[[], Any]) -> None:
        async def met() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        await asyncio.wait_for(met(), DEADLINE_S)


def entries(*steps: int, whole: bool = False) -> local_pb2.LedgerEntries:
    rows = [job_pb2.LedgerEntry(step=s, run="i", generation=3, start=s, stop=s + 1) for s in steps]
    return local_pb2.LedgerEntries(entries=rows, whole=whole)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def most_waiting() -> int:
    return 100


@pytest.fixture
async def place(path: Path, most_waiting: int) -> AsyncIterator[Place]:
    place = Place(path, most_waiting)
    await place.recorder.start()
    yield place
    place.disk.answers.set()
    await place.recorder.close()


async def test_steps_are_written_off_the_loop_and_acknowledged(place: Place) -> None:
    place.hear(0, 1, whole=True)
    assert place.told == [], "the loop has waited for the disk"
    await place.until(lambda: place.told)
    assert place.steps() == [0, 1]
    assert place.told == [local_pb2.LedgerStored(committed=2, run="i", generation=3)]
    await place.recorder.close()
    assert threading.current_thread().name not in place.disk.threads


async def test_a_disk_that_does_not_answer_blocks_no_loop_and_keeps_the_order(place: Place) -> None:
    place.disk.answers.clear()
    place.hear(0, whole=True)
    for step in (1, 2, 3):
        place.hear(step)
        await asyncio.sleep(0.01)
    assert place.disk.appends == 1, "one write at a time"
    place.disk.answers.set()
    await place.until(lambda: place.stored() == 4)
    assert place.steps() == [0, 1, 2, 3]


async def test_steps_that_wait_at_the_end_are_written(place: Place) -> None:
    place.hear(0, whole=True)
    place.hear(1)
    await place.recorder.close()
    assert place.steps() == [0, 1]


async def test_a_full_disk_is_recorded_once_and_tried_again(place: Place, path: Path) -> None:
    place.hear(0, whole=True)
    await place.until(lambda: place.stored() == 1)
    place.disk.full = True
    place.hear(1)
    await place.until(lambda: place.disk.appends >= 4)
    place.hear(2)
    assert place.diary.of("ledger_failed") == [
        {"path": str(path), "reason": "No space left on device"}
    ]
    assert place.stored() == 1, "members must keep what is not stored"
    place.disk.full = False
    await place.until(lambda: place.stored() == 3)
    assert place.steps() == [0, 1, 2]
    assert place.diary.names() == ["ledger_failed", "ledger_continued"]
    assert place.asked_again() == 0


async def test_a_job_begins_even_if_the_disk_is_full(path: Path) -> None:
    place = Place(path)
    place.disk.full = True
    await place.recorder.start()
    assert place.diary.names() == ["ledger_failed"]
    place.hear(0, whole=True)
    place.disk.full = False
    await place.until(lambda: place.stored() == 1)
    await place.recorder.close()
    assert place.steps() == [0]


async def test_steps_wait_until_another_run_has_ended_that_writes_the_file(path: Path) -> None:
    other = LedgerFile(path, incarnation="other")
    other.open()
    place = Place(path)
    await place.recorder.start()
    assert place.diary.names() == ["ledger_failed"]
    assert "another run" in place.diary.of("ledger_failed")[0]["reason"]
    place.hear(0, whole=True)
    other.close()
    await place.until(lambda: place.stored() == 1)
    assert place.diary.names() == ["ledger_failed", "ledger_continued"]
    await place.recorder.close()
    assert place.steps() == [0]


async def test_a_recorder_does_not_start_with_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    recorder = Place(tmp_path / "missing" / "ledger").recorder
    with pytest.raises(ConfigurationError, match="--ledger"):
        await recorder.start()
    await asyncio.wait_for(recorder.close(), DEADLINE_S)


async def test_a_job_under_way_goes_on_until_its_file_can_be_opened(tmp_path: Path) -> None:
    """Otherwise no candidate could take over a job whose file is in a directory that has gone."""
    path = tmp_path / "missing" / "ledger"
    place = Place(path, is_required=False)
    await place.recorder.start()
    assert place.diary.names() == ["ledger_failed"]
    place.hear(0, whole=True)
    path.parent.mkdir()
    await place.until(lambda: place.stored() == 1)
    await place.recorder.close()
    assert place.steps() == [0]


@pytest.mark.parametrize("most_waiting", [8])
async def test_steps_beyond_the_limit_of_waiting_ones_are_requested_again(place: Place) -> None:
    place.disk.full = True
    place.hear(0, whole=True)
    await place.until(lambda: place.disk.appends)
    for step in range(1, 200):
        place.hear(step)
        assert len(place.recorder._waiting) <= 8
    place.disk.full = False
    await place.until(place.asked_again)
    place.hear(200)  # sent before the request came: there is a gap before it
    await place.until(lambda: place.disk.path.exists())
    assert 200 not in place.steps()
    first = place.stored()
    for start in range(first, 201, 4):
        steps = range(start, min(start + 4, 201))
        place.hear(*steps, whole=start == first)
        await place.until(lambda steps=steps: place.stored() == steps.stop)
    assert place.steps() == list(range(201))
    assert place.asked_again() == 1


async def test_nothing_is_written_or_lost_while_another_coordinator_may_lead(place: Place) -> None:
    place.leads = False
    place.hear(0, whole=True)
    place.hear(1)
    place.recorder.record()
    await asyncio.sleep(0.05)
    assert place.disk.appends == 0
    place.leads = True
    place.recorder.record()
    place.recorder.record()
    await place.until(lambda: place.told)
    assert place.steps() == [0, 1]
    assert [t.committed for t in place.told] == [2]


async def test_nothing_is_written_at_the_end_if_another_coordinator_may_lead(place: Place) -> None:
    place.leads = False
    place.hear(0, whole=True)
    await place.recorder.close()
    assert place.steps() == []


async def test_a_disk_that_never_answers_does_not_hold_up_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.coordinator.step_recorder._PATIENCE_S", 0.1)
    place = Place(path)
    await place.recorder.start()
    place.disk.answers.clear()
    place.hear(0, whole=True)
    await asyncio.wait_for(place.recorder.close(), DEADLINE_S)
    place.disk.answers.set()


# ---- a new coordinator stores nothing until a member has sent all that is not stored yet


async def test_steps_are_ignored_until_a_node_has_sent_all_unstored_ones(place: Place) -> None:
    place.hear(7)  # 5 and 6 were sent when nobody led
    assert not place.recorder._waiting
    place.hear(5, 6, 7, whole=True)
    place.hear(8)
    await place.until(lambda: place.stored() == 9)
    assert place.steps() == [5, 6, 7, 8]


async def test_steps_on_a_new_stream_are_ignored_until_all_are_sent_again(place: Place) -> None:
    place.hear(0, whole=True)
    place.node = arrived()
    place.hear(2)
    place.hear(1, 2, 3, whole=True)
    await place.until(lambda: place.stored() == 4)
    assert place.steps() == [0, 1, 2, 3]


@pytest.mark.parametrize("known_by", ["its report", "the store"])
async def test_members_of_a_group_that_is_over_are_not_listened_to(
    path: Path, known_by: str
) -> None:
    """One wakes up and tells a new leader steps that its lineage has committed, and that the job
    has gone back from. They would void those that are stored."""
    place = Place(path, newest_group=3 if known_by == "the store" else 0)
    await place.recorder.start()
    late, node = arrived(), arrived()
    if known_by == "its report":
        place.recorder.take(node, [], whole=True, group=3)
    rows = [
        job_pb2.LedgerEntry(step=s, run="i", generation=1, start=s, stop=s + 1) for s in (7, 8, 9)
    ]
    place.recorder.take(late, rows, whole=True, group=1)
    place.recorder.take(node, entries(5).entries, whole=True, group=3)
    await place.until(lambda: place.stored() == 6)
    place.recorder.take(late, rows, whole=True, group=1)
    place.recorder.take(node, entries(6).entries, whole=False, group=4)
    await place.until(lambda: place.stored() == 7)
    await place.recorder.close()
    assert place.steps() == [5, 6]


async def test_members_of_an_older_version_do_not_name_their_group(place: Place) -> None:
    place.recorder.take(place.node, entries(0).entries, whole=True, group=3)
    place.recorder.take(place.node, entries(1).entries, whole=False)
    await place.until(lambda: place.stored() == 2)
    assert place.steps() == [0, 1]
