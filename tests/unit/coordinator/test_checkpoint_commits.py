"""A checkpoint is committed from the reports of one step and one generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import group_name, path_in_step, shard_name
from elastic.coordinator.saves import CheckpointCommits, SaveSuperseded
from elastic.errors import CheckpointWriteError, TransientError
from elastic.v1 import job_pb2 as pb


def name(index: int, generation: int = 1, run: str = "r1") -> str:
    return shard_name(index, 2, group_name(generation, run))


class Run:
    """A run whose members write shares to a directory and report them to the leader's `commits`."""

    def __init__(
        self, directory: CheckpointDirectory, job: str = "digits", run: str = "r1", keep: int = 2
    ) -> None:
        self.directory, self.run = directory, run
        self.commits = CheckpointCommits(directory, job=job, run=run, keep_last=keep)
        self.claim, self.commit = self.commits.claim, self.commits.commit

    def save(self, step: int, *indices: int, generation: int = 1, size_bytes: int = 10) -> None:
        for index in indices:
            relative = path_in_step(step, name(index, generation, self.run))
            digest = self.directory.write(relative, b"x" * size_bytes)
            self.report(step, index, generation, digest.size_bytes)

    def report(self, step: int, index: int, generation: int, size_bytes: int) -> None:
        digest = pb.FileDigest(
            name=name(index, generation, self.run), size_bytes=size_bytes, xxh3_128=f"{index:032x}"
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

    def commits_of(self, generation: int, *steps: int) -> None:
        for step in steps:
            self.save(step, 0, 1, generation=generation)
            self.commit(step, generation)
            self.commits.prune()

    def left(self) -> list[tuple[int, int]]:
        """The (step, generation) of the checkpoints that count, newest first."""
        steps = catalog.list_checkpoints(self.directory)
        return [(s, catalog.read_manifest(self.directory, s).generation) for s in steps]


@pytest.fixture(params=["path", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointDirectory]:
    if request.param == "path":
        yield open_directory(str(tmp_path))
        return
    yield open_directory("memory://bucket/checkpoints")
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


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

    def pause_and_write(relative: str, data: bytes, *, replace: bool = True) -> FileDigest:
        if not relative.endswith("manifest.json"):
            return write(relative, data, replace=replace)
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
    assert not run.directory.list("step-000000006"), "nobody would remove it"
    other.save(7, 0, 1)
    run.save(7, 0, 1)
    with pytest.raises(CheckpointWriteError):
        run.commit(7, 1)
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


# ---- the lineage


def test_a_lineage_that_was_given_up_costs_the_one_that_lives_no_checkpoint(
    storage: CheckpointDirectory,
) -> None:
    """The late reports of generation 1 come before anybody knows where generation 3 began."""
    run = Run(storage, keep=3)
    run.commits_of(1, 220, 240, 260)
    assert run.commits.began(3, 40) == {220: 1, 240: 1, 260: 1}
    run.commits_of(3, 60, 80, 100)
    assert run.left() == [(100, 3), (80, 3), (60, 3)]
    assert catalog.newest_step(storage) == 100


@pytest.mark.parametrize("leader", ["same", "next", "deposed"])
def test_a_late_save_of_a_lineage_that_was_given_up_is_refused(
    storage: CheckpointDirectory, leader: str
) -> None:
    """Whoever leads, or thinks so: the record lies where the checkpoints are."""
    run = Run(storage, keep=3)
    run.claim()
    run.commits_of(1, 40)
    deposed = Run(storage)
    deposed.claim()
    deposed.commits_of(1, 60)
    run.commits.began(2, 60)
    run.commits.began(3, 40)
    late = {"same": run, "next": Run(storage), "deposed": deposed}[leader]
    for step, generation in ((220, 1), (80, 2)):
        late.save(step, 0, 1, generation=generation)
        with pytest.raises(SaveSuperseded, match=f"step {step} of generation {generation}"):
            late.commit(step, generation)
    assert run.left() == [(40, 1)]


def test_a_late_save_of_an_ancestor_is_committed(storage: CheckpointDirectory) -> None:
    """Its group was lost while it wrote, but the next one has gone on from a later step."""
    run = Run(storage)
    run.save(40, 0, 1, generation=1)
    run.commits.began(2, 42)
    run.commits.began(3, 47)
    run.commit(40, 1)
    run.save(47, 0, 1, generation=2)
    run.commit(47, 2)
    assert run.left() == [(47, 2), (40, 1)]


def test_a_step_that_was_saved_in_another_lineage_is_saved_again(
    storage: CheckpointDirectory,
) -> None:
    run = Run(storage)
    run.commits_of(1, 40, 60)
    run.save(60, 0, 1, generation=3, size_bytes=100)  # before the other one is set aside
    assert run.commits.began(3, 40) == {60: 1}
    assert run.commit(60, 3).size_bytes == 200
    assert run.left() == [(60, 3), (40, 1)]
    assert storage.list("step-000000060") == ["manifest.json", name(0, 3), name(1, 3)]


def test_a_save_that_is_under_way_survives_a_late_commit_of_an_earlier_lineage(run: Run) -> None:
    """The late commit is of a later step, but of an earlier group."""
    run.save(80, 0, generation=3)
    run.save(260, 0, 1, generation=1)
    run.commit(260, 1)
    run.save(80, 1, generation=3)
    run.commit(80, 3)
    assert (80, 3) in run.left()


def test_a_run_that_resumes_goes_on_in_the_lineage_that_lives(
    storage: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage fails before the dead lineage is set aside, and generations count from 1."""
    first = Run(storage)
    first.claim()
    first.commits_of(1, 40, 260)
    with monkeypatch.context() as failing:
        failing.setattr(catalog, "set_aside", _fails)
        with pytest.raises(CheckpointWriteError):
            first.commits.began(3, 40)
    assert first.left() == [(40, 1)], "the record comes first"
    second = Run(storage, run="r2")
    second.claim()
    assert second.left() == [(40, 1)]
    assert second.commits.newest() == 40
    assert second.commits.began(1, 40) == {260: 1}
    second.commits_of(1, 60)
    assert second.left() == [(60, 1), (40, 1)]
    assert catalog.read_manifest(storage, 60).run == "r2"


def _fails(*_: object) -> None:
    raise CheckpointWriteError("the storage is away")


def test_the_next_commit_records_what_storage_has_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.commits_of(1, 40, 260)
    with monkeypatch.context() as failing:
        failing.setattr(run.directory, "write", _fails)
        with pytest.raises(CheckpointWriteError):
            run.commits.began(3, 40)
    run.commits_of(3, 60)
    assert run.left() == [(60, 3), (40, 1)]


def test_checkpoints_count_if_members_of_an_older_version_do_not_say_where_they_went_on(
    run: Run,
) -> None:
    run.commits_of(1, 40)
    run.commits_of(2, 60)
    assert run.left() == [(60, 2), (40, 1)]
    resumed = Run(run.directory, run="r2")
    resumed.claim()
    resumed.commits_of(1, 80)
    assert resumed.left() == [(80, 1), (60, 2)]
