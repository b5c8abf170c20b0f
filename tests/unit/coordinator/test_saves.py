"""Members' reports of shares become commits or abandoned saves, and agents are told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from elastic.coordinator.saves import CheckpointCommits, Committed, Saves, SaveSuperseded
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.errors import CheckpointWriteError
from elastic.v1 import job_pb2
from tests.unit.coordinator.agents import Diary, agent, sent


class Storage(CheckpointCommits):
    """A checkpoint directory that works, or fails if the test says so."""

    def __init__(self) -> None:
        self.reports: list[job_pb2.ShardSaved] = []
        self.claims = 0
        self.forks: list[tuple[int, int]] = []
        self.superseded: dict[int, int] = {}
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

    def began(self, generation: int, step: int) -> dict[int, int]:
        self.forks.append((generation, step))
        if self.error is not None:
            raise self.error
        return dict(self.superseded)

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
    """The saves of a job with or without a directory; `told` is what all agents were told."""

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


def test_all_shares_of_a_failed_save_are_removed() -> None:
    """Otherwise a full disk would stay full. Shares that other members write later go, too."""
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


def test_reports_of_shares_are_kept_and_posted_to_the_machine() -> None:
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


async def test_a_commit_is_told_to_all_and_repeated_if_an_agent_reports_late(place: Place) -> None:
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


async def test_a_step_whose_save_was_abandoned_may_be_saved_again(place: Place) -> None:
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


async def test_an_abandoned_save_is_recorded_once_even_if_it_is_told_again(place: Place) -> None:
    for message in ("no space", "the other members already know"):
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
async def test_a_commit_that_fails_abandons_the_save(
    place: Place, error: Exception, message: str
) -> None:
    place.storage.error = error
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.settled() == [(5, True)]
    assert place.diary.of("checkpoint_abandoned")[0]["message"] == message
    assert place.saves.newest_step == 0


async def test_a_commit_stands_if_old_checkpoints_cannot_be_removed(place: Place) -> None:
    place.storage.prune_error = CheckpointWriteError("old checkpoints could not be removed")
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.settled() == [(5, False)]
    assert place.saves.newest_step == 5
    assert not place.diary.of("checkpoint_abandoned")
    (warning,) = place.diary.of("warning")
    assert warning["message"] == "old checkpoints could not be removed"


async def test_checkpoints_are_committed_in_the_order_of_their_completion(place: Place) -> None:
    """A commit drops the reports of earlier steps, so a later step must not come first."""
    begun, committed = threading.Event(), []

    def commit(step: int, generation: int) -> Committed:
        del generation
        if step == 5:
            begun.set()
            time.sleep(0.2)  # enough for the other commit to overtake, if it can
        committed.append(step)
        return Committed(size_bytes=1, stall_s=0.0, save_s=0.0)

    place.storage.commit = commit  # type: ignore[method-assign]
    first = asyncio.ensure_future(place.saves.commit(fx.CommitCheckpoint(generation=3, step=5)))
    await asyncio.to_thread(begun.wait)
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=6))
    await first
    assert committed == [5, 6]
    assert place.saves.newest_step == 6


async def test_late_reports_of_the_last_few_commits_are_answered(place: Place) -> None:
    for step in range(1, 21):
        await place.saves.commit(fx.CommitCheckpoint(generation=3, step=step))
    place.saves.saved(place.agent, shard(20))
    place.saves.saved(place.agent, shard(13))
    assert len(sent(place.agent)) == 2
    place.events.clear()
    place.saves.saved(place.agent, shard(12))
    assert sent(place.agent) == []
    assert len(place.events) == 1


async def test_a_job_without_a_directory_commits_nothing() -> None:
    place = Place(directory=False)
    assert place.saves.url == ""
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.settled() == []
    place.saves.abandon(fx.AbandonCheckpoint(generation=3, step=5, message="x"))
    assert place.settled() == [(5, True)]


@pytest.mark.parametrize("steps", [(5, 6), (6, 5)])
async def test_concurrent_commits_are_all_announced(place: Place, steps: tuple[int, int]) -> None:
    await asyncio.gather(
        *(place.saves.commit(fx.CommitCheckpoint(generation=3, step=s)) for s in steps)
    )
    assert sorted(place.settled()) == [(5, False), (6, False)]


def test_shares_of_a_failed_save_that_cannot_be_removed_cause_a_warning() -> None:
    """Otherwise the error would end the coordinator, as any error of a task does."""
    place = Place()
    place.storage.discard_error = RuntimeError("can't start new thread")
    place.saves.failed(place.agent, job_pb2.SaveFailed(generation=3, step=5, message="full"))
    (warning,) = place.diary.of("warning")
    assert "can't start new thread" in warning["message"]


def test_a_last_save_that_is_retried_is_no_failure_until_it_is_given_up() -> None:
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


async def test_a_last_save_that_succeeds_after_a_retry_is_kept(place: Place) -> None:
    refused = job_pb2.SaveFailed(generation=3, step=5, message="full", retried=True)
    place.saves.failed(place.agent, refused)
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=5))
    assert place.saves.last_failure == ""
    place.saves.give_up_last()
    assert place.storage.discarded == []


# ---- the lineage


async def went_back(place: Place) -> None:
    """The group of generation 3 has saved step 60; that of generation 4 goes on from step 40."""
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=60))
    place.told.clear()
    place.events.clear()
    place.storage.superseded = {60: 3}
    place.saves.began(4, 40)


async def test_checkpoints_beyond_the_step_from_which_a_group_goes_on_are_set_aside(
    place: Place,
) -> None:
    await went_back(place)
    assert place.storage.forks == [(4, 40)]
    assert place.events == [ev.GroupBegan(generation=4, step=40)]
    assert place.diary.of("checkpoints_set_aside") == [
        {"steps": [60], "generation": 4, "from_step": 40}
    ]
    assert {(t["checkpoint"].step, t["checkpoint"].generation) for t in place.told} == {(60, 3)}
    assert place.settled()[0] == (60, True), "members must not take the step for saved"
    assert place.saves.newest_step == 4, "what is left in the directory"
    place.saves.saved(place.agent, shard(60))
    assert sent(place.agent) == [], "nor when they ask again"


async def test_a_group_is_known_to_have_begun_from_the_first_report(place: Place) -> None:
    for _ in range(2):
        report = shard()
        report.began_at = 2
        place.saves.saved(place.agent, report)
    place.saves.began(2, 9)
    assert place.storage.forks == [(3, 2)]
    assert place.events[0] == ev.GroupBegan(generation=3, step=2)


async def test_a_refused_save_of_another_lineage_is_no_failure_of_this_one(place: Place) -> None:
    place.storage.error = SaveSuperseded("step 60 is of a lineage that was given up")
    await place.saves.commit(fx.CommitCheckpoint(generation=3, step=60))
    assert place.settled() == [(60, True)]
    assert place.saves.last_failure == ""
    assert place.diary.of("checkpoint_abandoned")[0]["reason"] == "superseded"


async def test_storage_that_is_away_when_a_group_begins_causes_a_warning(place: Place) -> None:
    place.storage.error = CheckpointWriteError("the storage is away")
    place.saves.began(4, 40)
    (warning,) = place.diary.of("warning")
    assert warning["message"] == "the storage is away"


def test_a_job_without_a_directory_has_begun_all_the_same() -> None:
    nowhere = Place(directory=False)
    nowhere.saves.began(1, 0)
    assert nowhere.events == [ev.GroupBegan(generation=1, step=0)]
