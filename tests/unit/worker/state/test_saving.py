"""A save is reported, and reported again to a leader that may be new, until it is settled."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import open_directory
from elastic.core.worker.participation import Progress
from elastic.errors import CheckpointWriteError, GroupLost
from elastic.worker.group.process_group import Group
from elastic.worker.state.checkpointing import Checkpointing
from elastic.worker.state.job_state import JobState
from elastic.worker.state.shards import load
from tests.unit.checkpoint.manifests import make_manifest
from tests.unit.worker.state.job_states import At


def group(generation: int, rank: int = 0, world_size: int = 1) -> Group:
    """A stand-in with the attributes that a save reads."""
    decided = SimpleNamespace(number=generation, incarnation="run")
    backend = SimpleNamespace(device=torch.device("cpu"))
    return cast(
        Group,
        SimpleNamespace(generation=decided, rank=rank, world_size=world_size, backend=backend),
    )


class Job:
    """A member that saves alone."""

    def __init__(self, root: Path, every: int = 2) -> None:
        self.root = root
        self.sent: list[dict[str, Any]] = []
        self.saver = Checkpointing(
            open_directory(str(root)),
            worker="w",
            every=every,
            send=lambda **kind: self.sent.append(kind),
        )
        self.state = JobState()
        self.state.track({"model": torch.nn.Linear(2, 1)})

    def save(self, step: int, generation: int = 3, began_at: int = 0) -> None:
        self.state.job = At(Progress(committed=step))
        self.saver.save(self.state, group(generation), began_at=began_at)
        self.saver.wait_idle()

    def again(self) -> list[tuple[str, int, int]]:
        """The (kind, step, generation) of what `report_again` sends."""
        self.sent.clear()
        self.saver.report_again()
        return [(k, r.step, r.generation) for sent in self.sent for k, r in sent.items()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_shard_is_reported_when_it_is_written_and_again_when_asked(job: Job) -> None:
    job.save(2)
    ((kind, report),) = job.sent[0].items()
    assert kind == "shard_saved"
    assert (report.worker, report.step, report.generation) == ("w", 2, 3)
    assert (report.index, report.count) == (0, 1)
    assert {f.name for f in report.files} == {
        "shard-00000-of-00001-g3-run.safetensors",
        "structure-g3-run.json",
    }
    assert job.again() == job.again() == [("shard_saved", 2, 3)]


@pytest.mark.parametrize("committed", [True, False])
def test_a_settled_save_is_not_reported_again(job: Job, committed: bool) -> None:
    job.save(2)
    assert not job.saver.is_settled(2, 0.0)
    job.saver.settle(2, committed=committed)
    assert job.saver.is_settled(2, 0.0)
    assert job.saver.is_committed(2) is committed
    assert job.again() == []


def test_settling_a_save_settles_the_earlier_saves(job: Job) -> None:
    job.save(2)
    job.save(4)
    job.save(6)
    assert [step for _, step, _ in job.again()] == [2, 4, 6]
    job.saver.settle(4, committed=True)
    assert [step for _, step, _ in job.again()] == [6]


@pytest.mark.parametrize("abandoned", [True, False])
def test_a_group_saves_a_step_once(job: Job, abandoned: bool) -> None:
    """A second save could change the reported file by what was acknowledged meanwhile."""
    job.save(2)
    if abandoned:
        job.saver.settle(2, committed=False)
    before = {path: path.stat().st_mtime_ns for path in job.root.rglob("*")}
    job.sent.clear()
    job.save(2)
    assert {path: path.stat().st_mtime_ns for path in job.root.rglob("*")} == before
    assert job.sent == []
    assert job.saver.is_settled(2, 0.0) is abandoned


def test_training_does_not_wait_for_a_storage_that_stands_still(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    directory = type(job.saver._directory)
    write = directory.write

    def stand_still(*args: Any, **how: Any) -> FileDigest:
        answers.wait()
        return write(*args, **how)

    monkeypatch.setattr(directory, "write", stand_still)
    monkeypatch.setattr("elastic.worker.state.checkpointing._PATIENCE_S", 0.05)
    for step in (2, 4, 6):
        job.state.job = At(Progress(committed=step))
        since = time.monotonic()
        job.saver.save(job.state, group(3), began_at=0)
        assert time.monotonic() - since < 5.0
    refused = [sent["save_failed"] for sent in job.sent]
    assert [(f.step, f.generation, f.retried) for f in refused] == [(4, 3, False), (6, 3, False)]
    assert "the storage has not taken the save before" in refused[0].message
    with pytest.raises(GroupLost):
        job.saver.save_and_wait(job.state, group(4), lambda: True, began_at=0)
    answers.set()
    job.saver.wait_idle()
    job.save(8)
    assert [(kind, step) for kind, step, _ in job.again()] == [
        ("save_failed", 4),
        ("save_failed", 6),
        ("shard_saved", 2),
        ("shard_saved", 8),
    ]


def test_a_checkpoint_holds_the_buffers_of_rank_0(tmp_path: Path) -> None:
    """Members' buffers may differ; a checkpoint holds the statistics of one member only."""
    reports = []
    for rank in range(3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 40), torch.nn.BatchNorm1d(40))
        job = Job(tmp_path)
        job.state = JobState()
        job.state.track({"model": model})
        model[1].running_mean.fill_(rank)
        model[1].running_var.fill_(10 + rank)
        job.state.job = At(Progress(committed=2))
        job.saver.save(job.state, group(3, rank, 3), began_at=0)
        job.saver.wait_idle()
        reports.append(job.sent[0]["shard_saved"])
    directory = open_directory(str(tmp_path))
    digests = [
        FileDigest(name=f.name, size_bytes=f.size_bytes, xxh3_128=f.xxh3_128)
        for report in reports
        for f in report.files
    ]
    catalog.commit(directory, make_manifest(2, 3, digests))
    loaded = load(directory, 2)
    assert loaded.tensors["model.1.running_mean"].tolist() == [0.0] * 40
    assert loaded.tensors["model.1.running_var"].tolist() == [10.0] * 40
    assert torch.equal(loaded.tensors["model.0.weight"], model[0].weight)


def test_a_step_saved_again_by_another_group_is_reported_with_its_generation(job: Job) -> None:
    job.save(2, generation=3)
    job.saver.settle(2, committed=False)
    job.save(2, generation=4)
    assert not job.saver.is_settled(2, 0.0)
    assert job.again() == [("shard_saved", 2, 4)]


def test_abandoning_the_save_of_an_earlier_group_does_not_settle_the_newer_one(job: Job) -> None:
    """The earlier save was abandoned when a member was lost; this group saves the same step."""
    job.save(2, generation=3)
    job.save(2, generation=4)
    job.saver.settle(2, committed=False, generation=3)
    assert not job.saver.is_settled(2, 0.0)
    assert job.again() == [("shard_saved", 2, 4)]
    job.saver.settle(2, committed=False, generation=4)
    assert job.saver.is_settled(2, 0.0)


def test_a_commit_settles_a_step_whichever_group_has_saved_it(job: Job) -> None:
    job.save(2, generation=4)
    job.saver.settle(2, committed=True, generation=3)
    assert job.saver.is_committed(2)


@pytest.mark.parametrize(
    ("error", "gist"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("cannot schedule new futures"), "new futures"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_save_is_reported_again_until_it_is_settled(
    job: Job, monkeypatch: pytest.MonkeyPatch, error: Exception, gist: str
) -> None:
    """Any kind of error is reported, since the others wait for the report."""

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("elastic.worker.state.checkpointing.write_share", full)
    job.save(2)
    ((kind, report),) = job.sent[0].items()
    assert kind == "save_failed"
    assert gist in report.message
    assert job.again() == [("save_failed", 2, 3)]
    job.saver.settle(2, committed=False)
    assert job.again() == []


def test_a_committed_checkpoint_is_not_written_again(job: Job) -> None:
    job.save(2)
    ((_, report),) = job.sent[0].items()
    directory = open_directory(str(job.root))
    digests = [
        FileDigest(name=f.name, size_bytes=f.size_bytes, xxh3_128=f.xxh3_128) for f in report.files
    ]
    catalog.commit(directory, make_manifest(2, 1, digests))
    restored = Job(job.root)
    restored.save(2, generation=4, began_at=2)
    assert restored.sent == []
    assert restored.saver.is_committed(2)
    assert restored.again() == []


def test_a_last_save_is_retried_until_the_storage_accepts_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.worker.state.checkpointing._RETRY_S", 0.0)
    job.state.job = At(Progress(committed=2))
    shards = job.root / "step-000000002"
    with monkeypatch.context() as full:
        directory = type(job.saver._directory)
        write = directory.write

        def refuse_structure(self: Any, relative: str, data: Any, **how: Any) -> FileDigest:
            if "structure" in relative:
                raise CheckpointWriteError("No space left on device")
            return write(self, relative, data, **how)

        full.setattr(directory, "write", refuse_structure)
        job.saver.save(job.state, group(3), began_at=0, insists=True)
        for _ in range(3):
            job.saver.wait_idle()
            assert not list(shards.iterdir()), "its own part makes room"
            job.saver.try_again()
        job.saver.wait_idle()
    assert len(job.sent) == 4
    assert all(sent["save_failed"].retried for sent in job.sent)
    job.saver.try_again()
    job.saver.wait_idle()
    assert job.again() == [("shard_saved", 2, 3)]
    job.saver.try_again()
    assert job.saver._writing is None, "once it is written there is nothing to do"


def test_a_save_without_insists_is_not_retried(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elastic.worker.state.checkpointing._RETRY_S", 0.0)
    monkeypatch.setattr("elastic.worker.state.checkpointing.write_share", full)
    job.save(2)
    job.saver.try_again()
    assert job.saver._writing is None
    assert not job.sent[0]["save_failed"].retried


def committed_as(job: Job, step: int, generation: int) -> None:
    """Write the manifest of what the member reported last."""
    ((_, report),) = job.sent[-1].items()
    digests = [
        FileDigest(name=f.name, size_bytes=f.size_bytes, xxh3_128=f.xxh3_128) for f in report.files
    ]
    manifest = replace(make_manifest(step, 1, digests), generation=generation)
    catalog.commit(open_directory(str(job.root)), manifest)


def test_a_step_that_another_lineage_has_saved_is_written(job: Job) -> None:
    """The manifest of the group that was given up may still be there."""
    job.save(2, generation=3)
    committed_as(job, 2, 3)
    later = Job(job.root)
    later.save(2, generation=4, began_at=1)
    assert [(r.step, r.generation, r.began_at) for r in map(saved, later.sent)] == [(2, 4, 1)]
    assert not later.saver.is_settled(2, 0.0)


def saved(sent: dict[str, Any]) -> Any:
    return sent["shard_saved"]


def test_a_member_that_goes_back_forgets_what_it_knew_of_later_saves(job: Job) -> None:
    for step in (2, 4):
        job.saver.settle(step, committed=True)
    job.save(6)
    job.saver.went_on_from(2)
    assert (job.saver.is_committed(2), job.saver.is_committed(4)) == (True, False)
    assert job.again() == []
