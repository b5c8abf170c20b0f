"""A checkpoint is committed from the reports of one step and one generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import group_name, path_in_step, shard_name
from elastic.coordinator.saves import CheckpointCommits
from elastic.errors import CheckpointWriteError, TransientError
from elastic.v1 import job_pb2 as pb


def name(index: int, generation: int = 1) -> str:
    return shard_name(index, 2, group_name(generation, "run"))


class Run:
    """A run whose members write shares to a directory and report them to the leader's `commits`."""

    def __init__(
        self, directory: CheckpointDirectory, job: str = "digits", run: str = "r1"
    ) -> None:
        self.directory = directory
        self.commits = CheckpointCommits(directory, job=job, run=run, keep_last=2)
        self.claim, self.commit = self.commits.claim, self.commits.commit

    def save(self, step: int, *indices: int, generation: int = 1, size_bytes: int = 10) -> None:
        for index in indices:
            relative = path_in_step(step, name(index, generation))
            digest = self.directory.write(relative, b"x" * size_bytes)
            self.report(step, index, generation, digest.size_bytes)

    def report(self, step: int, index: int, generation: int, size_bytes: int) -> None:
        digest = pb.FileDigest(
            name=name(index, generation), size_bytes=size_bytes, xxh3_128=f"{index:032x}"
        )
        self.commits.reported(
            pb.ShardSaved(
                worker=f"w{index}",
                step=step,
                generation=generation,
                index=index,
                count=2,
                files=[digest],
                epoch=3,
                cursor=64,
                learning_rate_json='{"0": 0.5}',
            )
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(open_directory(str(tmp_path)))


def test_the_manifest_contains_what_members_have_reported(run: Run) -> None:
    run.save(5, 1, size_bytes=7)
    run.save(5, 0)
    assert run.commit(5, 1).size_bytes == 17
    manifest = catalog.read_manifest(run.directory, 5)
    assert (manifest.job, manifest.step, manifest.generation) == ("digits", 5, 1)
    assert (manifest.world_size, manifest.epoch, manifest.cursor) == (2, 3, 64)
    assert manifest.learning_rate == {"0": 0.5}
    assert [(f.name, f.size_bytes) for f in manifest.files] == [
        (name(0), 10),
        (name(1), 7),
    ]
    assert run.commits.url == run.directory.url


def test_shares_of_different_generations_are_not_mixed(run: Run) -> None:
    """A share that was written before the group broke may have other bytes."""
    run.save(5, 0, generation=1, size_bytes=1)
    run.save(5, 0, 1, generation=2, size_bytes=100)
    run.report(5, 1, generation=1, size_bytes=1)
    assert run.commit(5, 2).size_bytes == 200
    assert catalog.read_manifest(run.directory, 5).generation == 2
    assert run.directory.list("step-000000005") == ["manifest.json", name(0, 2), name(1, 2)]


def test_a_step_that_is_committed_is_not_committed_again(run: Run) -> None:
    """Two groups may have saved the step; the second one's files may be swept already."""
    run.save(5, 0, 1, generation=1)
    run.save(5, 0, 1, generation=2, size_bytes=100)
    assert run.commit(5, 1).size_bytes == 20
    assert run.commit(5, 2).size_bytes == 20
    assert catalog.read_manifest(run.directory, 5).generation == 1
    assert run.directory.list("step-000000005") == ["manifest.json", name(0, 1), name(1, 1)]


def test_a_share_reported_again_counts_once(run: Run) -> None:
    run.save(5, 0, 1, 1)
    assert run.commit(5, 1).size_bytes == 20


def test_old_checkpoints_are_removed(run: Run) -> None:
    for step in (5, 10, 15):
        run.save(step, 0, 1)
        run.commit(step, 1)
    assert set(catalog.list_checkpoints(run.directory)) == {5, 10, 15}
    run.commits.prune()
    assert set(catalog.list_checkpoints(run.directory)) == {10, 15}


def test_an_abandoned_or_overtaken_save_cannot_be_committed(run: Run) -> None:
    run.save(5, 0)
    run.commits.forget(5, 1)
    run.commits.forget(5, 1)
    with pytest.raises(CheckpointWriteError, match="step 5 is not committed"):
        run.commit(5, 1)
    run.save(5, 0, 1)
    run.save(10, 0, 1, generation=2)
    run.commit(10, 2)
    with pytest.raises(CheckpointWriteError, match="a later step was committed first"):
        run.commit(5, 1)


def test_a_missing_share_prevents_the_commit_and_leaves_the_earlier_checkpoint(run: Run) -> None:
    run.save(5, 0, 1)
    run.commit(5, 1)
    run.save(10, 0)
    run.report(10, 1, generation=1, size_bytes=10)
    with pytest.raises(CheckpointWriteError, match="missing"):
        run.commit(10, 1)
    assert set(catalog.list_checkpoints(run.directory)) == {5}


def test_shares_that_come_after_a_later_commit_do_not_complete_an_earlier_save(run: Run) -> None:
    run.save(5, 0)
    run.save(6, 0, 1)
    run.commit(6, 1)
    run.save(5, 1)
    with pytest.raises(CheckpointWriteError, match="a later step was committed first"):
        run.commit(5, 1)
    assert catalog.list_checkpoints(run.directory) == (6,)


def test_a_manifest_that_another_coordinator_writes_during_a_commit_stands(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This coordinator is paused after it has looked for a manifest."""
    run.save(5, 0, 1)
    run.save(5, 0, 1, generation=2, size_bytes=100)
    other = Run(run.directory)
    other.claim()
    other.save(5, 0, 1, generation=2, size_bytes=100)
    run.claim()
    write = run.directory.write

    def pause_and_write(relative: str, data: bytes, *, replace: bool) -> FileDigest:
        monkeypatch.undo()
        assert other.commit(5, 2).size_bytes == 200
        return write(relative, data, replace=replace)

    monkeypatch.setattr(run.directory, "write", pause_and_write)
    assert run.commit(5, 1).size_bytes == 200
    assert catalog.read_manifest(run.directory, 5).generation == 2


def test_a_run_whose_directory_another_run_has_claimed_is_refused(run: Run) -> None:
    run.claim()
    run.save(5, 0, 1)
    run.commit(5, 1)
    other = Run(run.directory, "letters", "r2")
    other.claim()
    run.save(6, 0, 1)
    with pytest.raises(CheckpointWriteError, match=r"job letters has saved in .* since 20..-"):
        run.commit(6, 1)
    other.save(7, 0, 1)
    assert other.commit(7, 1).size_bytes == 20
    assert catalog.list_checkpoints(run.directory) == (7, 5)


def test_a_commit_succeeds_after_another_leader_of_the_same_run_has_claimed(run: Run) -> None:
    run.claim()
    next_leader = Run(run.directory)
    next_leader.claim()
    run.save(5, 0, 1)
    assert run.commit(5, 1).size_bytes == 20


def test_a_run_commits_without_its_owner_file_until_another_run_claims(run: Run) -> None:
    run.claim()
    run.directory.remove("owner.json")
    run.save(5, 0, 1)
    run.commit(5, 1)
    other = Run(run.directory, "digits", "r2")
    other.claim()
    run.save(6, 0, 1)
    with pytest.raises(CheckpointWriteError, match="a run of job digits has saved"):
        run.commit(6, 1)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"job":"j","run":"r","since_unix_s":1e300}'])
def test_an_owner_file_that_makes_no_sense_prevents_no_commit(run: Run, content: bytes) -> None:
    run.directory.write("owner.json", content)
    run.claim()
    run.save(5, 0, 1)
    assert run.commit(5, 1).size_bytes == 20


def test_the_first_commit_repeats_a_failed_claim(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(relative: str) -> bytes:
        raise TransientError(f"{relative} cannot be read")

    Run(run.directory, "letters", "r2").claim()
    with monkeypatch.context() as while_down:
        while_down.setattr(run.directory, "read", silent)
        run.claim()
    run.save(5, 0, 1)
    assert run.commit(5, 1).size_bytes == 20
    run.save(6, 0, 1)
    assert run.commit(6, 1).size_bytes == 20


def test_the_number_of_incomplete_saves_that_are_kept_is_bounded(run: Run) -> None:
    """A disk that is full for days leads to late shares of saves that were given up."""
    for step in range(1000):
        run.report(step, 0, generation=1, size_bytes=1)
    assert len(run.commits._reports) == 64
    run.save(1000, 0, 1)
    assert run.commit(1000, 1).size_bytes == 20


def test_durations_are_those_of_the_slowest_member(run: Run) -> None:
    run.save(5, 0, 1)
    for report in run.commits._reports[5, 1].values():
        report.stall_s, report.write_s = 0.1 * (report.index + 1), 3.0 - report.index
    done = run.commit(5, 1)
    assert done.stall_s == pytest.approx(0.2)
    assert 3.1 <= done.save_s < 30.0
