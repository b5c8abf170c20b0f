"""What members report of their saves, what becomes of it, and who is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from elastic.coordinator.saves import CheckpointCommits, Committed, Saves
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.errors import CheckpointWriteError
from elastic.v1 import job_pb2
from tests.unit.coordinator.agents import Diary, agent, sent


class Storage(CheckpointCommits):
    """A directory that takes what it is given, or fails."""

    def __init__(self) -> None:
        self.reports: list[job_pb2.ShardSaved] = []
        self.claims = 0
        self.forgotten: list[tuple[int, int]] = []
        self.discarded: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.prune_error: CheckpointWriteError | None = None
        self.discard_error: Exception | None = None

    @property
    def url(self) -> str:
        return "/checkpoints"

    def reported(self, report: job_pb2.ShardSaved) -> None:
        self.reports.append(report)

    def forget(self, step: int, generation: int) -> None:
        self.forgotten.append((step, generation))

    def claim(self) -> None:
        self.claims += 1

    def newest(self) -> int:
        return 4

    def discard(self, step: int, generation: int) -> None:
        self.discarded.append((step, generation))
        if self.discard_error is not None:
            raise self.discard_error

    def commit(self, step: int, generation: int) -> Committed:
        del step, generation
        if self.error is not None:
            raise self.error
        return Committed(size_bytes=4096, stall_s=0.25, save_s=1.5)

    def prune(self) -> None:
        if self.prune_error is not None:
            raise self.prune_error


class Place:
    """Saves of a job with or without a directory; `told` is what every agent heard."""

    def __init__(self, *, directory: bool = True) -> None:
        self.storage = Storage()
        self.diary = Diary()
        self.events: list[ev.Event] = []
        self.told: list[dict[str, Any]] = []
        self.agent = agent("n1")
        self.saves = Saves(
            self.storage if directory else None,
            self.diary.journal,
            post=self.events.append,
            broadcast=lambda **kind: self.told.append(kind),
            start=self._start,
        )

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        del name
        thread = threading.Thread(target=asyncio.run, args=(work,))
        thread.start()
        thread.join()

    def settled(self) -> list[tuple[int, bool]]:
        return [(t["checkpoint"].step, t["checkpoint"].abandoned) for t in self.told]


def shard(step: int = 5, index: int = 0) -> job_pb2.ShardSaved:
    return job_pb2.ShardSaved(worker="w", generation=3, step=step, index=index, count=2)


def test_of_a_refused_save_nothing_is_left() -> None:
    """A full disk would stay full. What its other members have written, or yet write, goes too."""
    place = Place()
    place.saves.saved(place.agent, shard())
    assert place.storage.discarded == []
    place.saves.failed(place.agent, job_pb2.SaveFailed(generation=3, step=5, message="full"))
    place.saves.saved(place.agent, shard(index=1))
    place.saves.saved(place.agent, shard(step=6))
    assert place.storage.discarded == [(5, 3), (5, 3)]


def test_the_newest_checkpoint_of_earlier_terms_is_known() -> None:
    place = Place()
    asyncio.run(place.saves.load())
    assert place.saves.newest_step == 4
    nowhere = Place(directory=False)
    asyncio.run(nowhere.saves.load())
    assert nowhere.saves.newest_step == 0


def test_parts_are_kept_and_reported_to_the_machine() -> None:
    place = Place()
    place.saves.saved(place.agent, shard())
    place.saves.failed(place.agent, job_pb2.SaveFailed(generation=3, step=6, message="full"))
    assert place.storage.reports == [shard()]
    assert place.events == [
        ev.ShardReported(worker="w", generation=3, step=5, index=0, count=2),
        ev.SaveReportedFailed(generation=3, step=6, message="full"),
    ]
    assert place.saves.url == "/checkpoints"


@pytest.fixture
async def place() -> Place:
    return Place()


async def test_everybody_hears_of_a_commit_and_whoever_missed_it_hears_again(place: Place) -> None:
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.saves.newest_step == 5
    assert place.settled() == [(5, False)]
    durations = {"stall_s": 0.25, "save_s": 1.5}
    assert place.diary.of("checkpoint_committed") == [{"step": 5, "bytes": 4096, **durations}]
    place.saves.saved(place.agent, shard(5))
    late = job_pb2.SaveFailed(generation=3, step=5, message="late")
    place.saves.failed(place.agent, late)
    assert [m.checkpoint.step for m in sent(place.agent)] == [5, 5]
    assert place.events == [ev.CheckpointCommitted(generation=3, step=5)]
    assert place.storage.reports == []


async def test_an_abandoned_one_may_be_saved_again(place: Place) -> None:
    place.saves.abandon(
        fx.AbandonCheckpoint(generation=3, step=5, message="w was lost", reason="member_lost")
    )
    assert place.settled() == [(5, True)]
    assert place.told[0]["checkpoint"].generation == 3
    assert place.storage.forgotten == [(5, 3)]
    assert place.diary.of("checkpoint_abandoned") == [
        {"step": 5, "reason": "member_lost", "message": "w was lost"}
    ]
    assert place.saves.newest_step == 0
    place.saves.saved(place.agent, shard(5))
    assert sent(place.agent) == []
    assert len(place.events) == 1


async def test_to_tell_it_again_to_one_that_has_missed_it_is_no_other_event(place: Place) -> None:
    for message in ("no space", "others were told before"):
        place.saves.abandon(fx.AbandonCheckpoint(generation=3, step=5, message=message))
    assert place.settled() == [(5, True), (5, True)]
    place.saves.abandon(fx.AbandonCheckpoint(generation=4, step=5, message="no space"))
    told = [e["message"] for e in place.diary.of("checkpoint_abandoned")]
    assert told == ["no space", "no space"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointWriteError("no space left"), "no space left"),
        (KeyError("a client's own error"), 'KeyError: "a client\'s own error"'),
    ],
)
async def test_a_commit_that_fails_is_an_abandoned_save(
    place: Place, error: Exception, message: str
) -> None:
    place.storage.error = error
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.settled() == [(5, True)]
    assert place.diary.of("checkpoint_abandoned")[0]["message"] == message
    assert place.saves.newest_step == 0


async def test_what_cannot_be_removed_takes_nothing_from_what_is_committed(place: Place) -> None:
    place.storage.prune_error = CheckpointWriteError("old checkpoints could not be removed")
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.settled() == [(5, False)]
    assert place.saves.newest_step == 5
    assert not place.diary.of("checkpoint_abandoned")
    (warning,) = place.diary.of("warning")
    assert warning["message"] == "old checkpoints could not be removed"


async def test_commits_are_made_in_the_order_in_which_checkpoints_were_whole(place: Place) -> None:
    """Each drops what was reported of the steps before it, so a later one must not be first."""
    begun, committed = threading.Event(), []

    def commit(step: int, generation: int) -> Committed:
        del generation
        if step == 5:
            begun.set()
            time.sleep(0.2)  # the other, if it can, is far ahead by then
        committed.append(step)
        return Committed(size_bytes=1, stall_s=0.0, save_s=0.0)

    place.storage.commit = commit  # type: ignore[method-assign]
    first = asyncio.ensure_future(place.saves.commit(fx.CommitCheckpoint(generation=3, step=5)))
    await asyncio.to_thread(begun.wait)
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=6))
    await first
    assert committed == [5, 6]
    assert place.saves.newest_step == 6


async def test_the_last_few_are_remembered(place: Place) -> None:
    for step in range(1, 21):
        await place.saves.commit(fx.CommitCheckpoint(generation=3, step=step))
    place.saves.saved(place.agent, shard(20))
    place.saves.saved(place.agent, shard(13))
    assert len(sent(place.agent)) == 2
    place.events.clear()
    place.saves.saved(place.agent, shard(12))
    assert sent(place.agent) == []
    assert len(place.events) == 1


async def test_a_job_without_a_directory_has_nothing_to_commit() -> None:
    place = Place(directory=False)
    assert place.saves.url == ""
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.settled() == []
    place.saves.abandon(fx.AbandonCheckpoint(generation=3, step=5, message="x"))
    assert place.settled() == [(5, True)]


@pytest.mark.parametrize("steps", [(5, 6), (6, 5)])
async def test_commits_at_the_same_time(place: Place, steps: tuple[int, int]) -> None:
    await asyncio.gather(
        *(place.saves.commit(fx.CommitCheckpoint(generation=3, step=s)) for s in steps)
    )
    assert sorted(place.settled()) == [(5, False), (6, False)]


def test_storage_that_keeps_what_is_to_go_is_warned_of() -> None:
    """It would end the coordinator otherwise, as any error of a task does."""
    place = Place()
    place.storage.discard_error = RuntimeError("can't start new thread")
    place.saves.failed(place.agent, job_pb2.SaveFailed(generation=3, step=5, message="full"))
    (warning,) = place.diary.of("warning")
    assert "can't start new thread" in warning["message"]


def test_a_last_save_that_is_tried_again_is_no_failure_while_there_is_time() -> None:
    place = Place()
    refused = job_pb2.SaveFailed(generation=3, step=5, message="full", retried=True)
    for _ in range(3):
        place.saves.failed(place.agent, refused)
    assert place.events == []
    assert place.told == []
    assert place.storage.discarded == []
    assert place.diary.of("save_retried") == [{"step": 5, "message": "full"}]
    assert place.saves.last_failure == "full"
    place.saves.give_up_last()
    assert place.storage.discarded == [(5, 3)]


async def test_of_a_last_save_that_succeeds_after_all_everything_stays(place: Place) -> None:
    refused = job_pb2.SaveFailed(generation=3, step=5, message="full", retried=True)
    place.saves.failed(place.agent, refused)
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.saves.last_failure == ""
    place.saves.give_up_last()
    assert place.storage.discarded == []
