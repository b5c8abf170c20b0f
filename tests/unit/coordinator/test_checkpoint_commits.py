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


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return open_directory(str(tmp_path))


@pytest.fixture
def commits(directory: CheckpointDirectory) -> CheckpointCommits:
    return CheckpointCommits(directory, job="digits", run="r1", keep_last=2)


def name(index: int, generation: int = 1) -> str:
    return shard_name(index, 2, group_name(generation, "run"))


class Members:
    """Write shares to the directory and report them."""

    def __init__(self, directory: CheckpointDirectory, commits: CheckpointCommits) -> None:
        self._directory = directory
        self._commits = commits

    def save(self, step: int, *indices: int, generation: int = 1, size_bytes: int = 10) -> None:
        for index in indices:
            relative = path_in_step(step, name(index, generation))
            digest = self._directory.write(relative, b"x" * size_bytes)
            self.report(step, index, generation, digest.size_bytes)

    def report(self, step: int, index: int, generation: int, size_bytes: int) -> None:
        digest = pb.FileDigest(
            name=name(index, generation), size_bytes=size_bytes, xxh3_128=f"{index:032x}"
        )
        self._commits.reported(
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
def members(directory: CheckpointDirectory, commits: CheckpointCommits) -> Members:
    return Members(directory, commits)


def test_the_manifest_says_what_was_reported(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    members.save(5, 1, size_bytes=7)
    members.save(5, 0)
    assert commits.commit(5, 1).size_bytes == 17
    manifest = catalog.read_manifest(directory, 5)
    assert (manifest.job, manifest.step, manifest.generation) == ("digits", 5, 1)
    assert (manifest.world_size, manifest.epoch, manifest.cursor) == (2, 3, 64)
    assert manifest.learning_rate == {"0": 0.5}
    assert [(f.name, f.size_bytes) for f in manifest.files] == [
        (name(0), 10),
        (name(1), 7),
    ]
    assert commits.url == directory.url


def test_generations_are_kept_apart(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    """A share that was written before the group broke may hold other bytes."""
    members.save(5, 0, generation=1, size_bytes=1)
    members.save(5, 0, 1, generation=2, size_bytes=100)
    members.report(5, 1, generation=1, size_bytes=1)
    assert commits.commit(5, 2).size_bytes == 200
    assert catalog.read_manifest(directory, 5).generation == 2
    assert directory.list("step-000000005") == ["manifest.json", name(0, 2), name(1, 2)]


def test_a_step_that_is_committed_is_not_committed_again(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    """Two groups may have saved it; the second one's files may be swept already."""
    members.save(5, 0, 1, generation=1)
    members.save(5, 0, 1, generation=2, size_bytes=100)
    assert commits.commit(5, 1).size_bytes == 20
    assert commits.commit(5, 2).size_bytes == 20
    assert catalog.read_manifest(directory, 5).generation == 1
    assert directory.list("step-000000005") == ["manifest.json", name(0, 1), name(1, 1)]


def test_a_share_reported_again_counts_once(members: Members, commits: CheckpointCommits) -> None:
    members.save(5, 0, 1, 1)
    assert commits.commit(5, 1).size_bytes == 20


def test_old_checkpoints_are_removed(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    for step in (5, 10, 15):
        members.save(step, 0, 1)
        commits.commit(step, 1)
    assert set(catalog.list_checkpoints(directory)) == {5, 10, 15}
    commits.prune()
    assert set(catalog.list_checkpoints(directory)) == {10, 15}


def test_what_is_abandoned_or_overtaken_is_forgotten(
    members: Members, commits: CheckpointCommits
) -> None:
    members.save(5, 0)
    commits.forget(5, 1)
    commits.forget(5, 1)
    with pytest.raises(CheckpointWriteError, match="step 5 is not committed"):
        commits.commit(5, 1)
    members.save(5, 0, 1)
    members.save(10, 0, 1, generation=2)
    commits.commit(10, 2)
    with pytest.raises(CheckpointWriteError, match="later step was first"):
        commits.commit(5, 1)


def test_a_share_that_is_not_there_leaves_the_earlier_checkpoint(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    members.save(5, 0, 1)
    commits.commit(5, 1)
    members.save(10, 0)
    members.report(10, 1, generation=1, size_bytes=10)
    with pytest.raises(CheckpointWriteError, match="missing"):
        commits.commit(10, 1)
    assert set(catalog.list_checkpoints(directory)) == {5}


def test_one_that_a_later_one_has_overtaken_is_not_made_of_what_came_since(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    members.save(5, 0)
    members.save(6, 0, 1)
    commits.commit(6, 1)
    members.save(5, 1)
    with pytest.raises(CheckpointWriteError, match="later step was first"):
        commits.commit(5, 1)
    assert catalog.list_checkpoints(directory) == (6,)


def test_a_manifest_that_another_coordinator_writes_meanwhile_stands(
    members: Members,
    commits: CheckpointCommits,
    directory: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This one was paused after it had looked."""
    members.save(5, 0, 1)
    members.save(5, 0, 1, generation=2, size_bytes=100)
    other = CheckpointCommits(directory, job="digits", run="r1", keep_last=2)
    other.claim()
    Members(directory, other).save(5, 0, 1, generation=2, size_bytes=100)
    commits.claim()
    write = directory.write

    def pause_and_write(relative: str, data: bytes, *, replace: bool) -> FileDigest:
        monkeypatch.undo()
        assert other.commit(5, 2).size_bytes == 200
        return write(relative, data, replace=replace)

    monkeypatch.setattr(directory, "write", pause_and_write)
    assert commits.commit(5, 1).size_bytes == 200
    assert catalog.read_manifest(directory, 5).generation == 2


def test_a_run_whose_directory_another_has_taken_is_refused(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    commits.claim()
    members.save(5, 0, 1)
    commits.commit(5, 1)
    other = CheckpointCommits(directory, job="letters", run="r2", keep_last=2)
    other.claim()
    members.save(6, 0, 1)
    with pytest.raises(CheckpointWriteError, match=r"job letters saves in .* since 20..-"):
        commits.commit(6, 1)
    Members(directory, other).save(7, 0, 1)
    assert other.commit(7, 1).size_bytes == 20
    assert catalog.list_checkpoints(directory) == (7, 5)


def test_leaders_of_one_run_follow_each_other(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    commits.claim()
    next_leader = CheckpointCommits(directory, job="digits", run="r1", keep_last=2)
    next_leader.claim()
    members.save(5, 0, 1)
    assert commits.commit(5, 1).size_bytes == 20


def test_a_directory_that_was_tidied_up_stays_with_its_run(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory
) -> None:
    commits.claim()
    directory.remove("owner.json")
    members.save(5, 0, 1)
    commits.commit(5, 1)
    other = CheckpointCommits(directory, job="digits", run="r2", keep_last=2)
    other.claim()
    members.save(6, 0, 1)
    with pytest.raises(CheckpointWriteError, match="a run of job digits saves"):
        commits.commit(6, 1)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"job":"j","run":"r","since_unix_s":1e300}'])
def test_an_owner_that_makes_no_sense_is_none(
    members: Members, commits: CheckpointCommits, directory: CheckpointDirectory, content: bytes
) -> None:
    directory.write("owner.json", content)
    commits.claim()
    members.save(5, 0, 1)
    assert commits.commit(5, 1).size_bytes == 20


def test_a_directory_that_did_not_answer_is_claimed_by_the_first_commit(
    members: Members,
    commits: CheckpointCommits,
    directory: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(relative: str) -> bytes:
        raise TransientError(f"{relative} cannot be read")

    CheckpointCommits(directory, job="letters", run="r2", keep_last=2).claim()
    with monkeypatch.context() as while_down:
        while_down.setattr(directory, "read", silent)
        commits.claim()
    members.save(5, 0, 1)
    assert commits.commit(5, 1).size_bytes == 20
    members.save(6, 0, 1)
    assert commits.commit(6, 1).size_bytes == 20


def test_saves_that_never_become_whole_are_not_kept_for_ever(
    members: Members, commits: CheckpointCommits
) -> None:
    """As on a disk that is full for days: late shares of those that were given up."""
    for step in range(1000):
        members.report(step, 0, generation=1, size_bytes=1)
    assert len(commits._reports) == 64
    members.save(1000, 0, 1)
    assert commits.commit(1000, 1).size_bytes == 20


def test_durations_are_those_of_the_slowest_member(
    members: Members, commits: CheckpointCommits
) -> None:
    members.save(5, 0, 1)
    for report in commits._reports[5, 1].values():
        report.stall_s, report.write_s = 0.1 * (report.index + 1), 3.0 - report.index
    done = commits.commit(5, 1)
    assert done.stall_s == pytest.approx(0.2)
    assert 3.1 <= done.save_s < 30.0
