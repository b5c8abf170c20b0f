"""The catalog commits, verifies, sweeps and prunes the checkpoints of a directory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from elastic.checkpoint import catalog
from elastic.checkpoint import directory as directory_module
from elastic.checkpoint.catalog import Catalog, Damage
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import path_in_step
from elastic.checkpoint.manifest import Manifest
from elastic.errors import CheckpointDamaged, CheckpointWriteError, ConfigurationError
from tests.unit.checkpoint.faults import (
    Countdown,
    DyingDirectory,
    FailingReads,
    Killed,
    every_kill_point,
)
from tests.unit.checkpoint.manifests import make_manifest

CONTENTS = {"shard-00000-of-00001.safetensors": b"t" * 1000, "structure.json": b"{}"}


@pytest.fixture(params=["path", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointDirectory]:
    if request.param == "path":
        yield open_directory(str(tmp_path))
        return
    yield open_directory("memory://bucket/checkpoints")
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def _write(directory: CheckpointDirectory, step: int) -> Manifest:
    files = (directory.write(path_in_step(step, n), content) for n, content in CONTENTS.items())
    return make_manifest(step, 1, files)


def _save(directory: CheckpointDirectory, step: int) -> Manifest:
    manifest = _write(directory, step)
    catalog.commit(directory, manifest)
    return manifest


def test_discarding_a_save_removes_only_its_groups_files(directory: CheckpointDirectory) -> None:
    own = ("shard-00000-of-00002-g7-5fa5c435.safetensors", "structure-g7-5fa5c435.json")
    others = (
        "shard-00000-of-00001-g70-5fa5c435.safetensors",
        "shard-00000-of-00002-g7-0123abcd.safetensors",
        "notes-g7-5fa5c435.txt",
    )
    for name in (*own, *others):
        directory.write(path_in_step(5, name), b"x")
    directory.write(path_in_step(6, own[0]), b"x")
    catalog.discard(directory, 5, "g7-5fa5c435")
    assert sorted(directory.list("step-000000005")) == sorted(others)
    catalog.discard(directory, 6, "g7-5fa5c435")
    assert catalog.scan(directory).uncommitted == (5,)
    catalog.discard(directory, 8, "g7-5fa5c435")


def test_only_a_step_with_a_manifest_is_a_checkpoint(directory: CheckpointDirectory) -> None:
    assert catalog.scan(directory) == Catalog(committed=(), uncommitted=())
    for step in (5, 1000000000, 20):
        _save(directory, step)
    _write(directory, 30)
    directory.write("notes.txt", b"x")
    directory.write("step-7/manifest.json", b"x")
    assert catalog.scan(directory) == Catalog(committed=(1000000000, 20, 5), uncommitted=(30,))
    assert catalog.list_checkpoints(directory) == (1000000000, 20, 5)


def test_a_manifest_is_read_back(directory: CheckpointDirectory) -> None:
    manifest = _save(directory, 5)
    assert catalog.read_manifest(directory, 5) == manifest


def test_a_manifest_in_the_wrong_place_is_damage(directory: CheckpointDirectory) -> None:
    _save(directory, 5)
    directory.write(
        path_in_step(6, "manifest.json"), directory.read("step-000000005/manifest.json")
    )
    with pytest.raises(CheckpointDamaged, match="manifest of step 5"):
        catalog.read_manifest(directory, 6)
    with pytest.raises(CheckpointDamaged, match=r"step-000000009/manifest.json is missing"):
        catalog.read_manifest(directory, 9)


def test_an_intact_checkpoint_has_no_problems(directory: CheckpointDirectory) -> None:
    _save(directory, 5)
    seen: list[int] = []
    assert catalog.verify(directory, 5, seen.append) == []
    assert sum(seen) == sum(map(len, CONTENTS.values()))


@pytest.mark.parametrize("name", list(CONTENTS))
@pytest.mark.parametrize(
    ("damage", "content"),
    [
        (Damage.WRONG_SIZE, lambda content: content[:-1]),
        (Damage.WRONG_SIZE, lambda content: content + b"x"),
        (Damage.WRONG_DIGEST, lambda content: bytes([content[0] ^ 1]) + content[1:]),
    ],
)
def test_each_kind_of_damage_is_named(
    directory: CheckpointDirectory, name: str, damage: Damage, content: object
) -> None:
    _save(directory, 5)
    assert callable(content)
    directory.write(path_in_step(5, name), content(CONTENTS[name]))
    (problem,) = catalog.verify(directory, 5)
    assert (problem.name, problem.damage) == (name, damage)
    assert str(problem).startswith(f"{name}: it")


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    _save(directory, 5)
    for name in CONTENTS:
        (tmp_path / path_in_step(5, name)).unlink()
    problems = catalog.verify(directory, 5)
    assert [(problem.name, problem.damage) for problem in problems] == [
        (name, Damage.MISSING) for name in CONTENTS
    ]


def test_a_damaged_manifest_is_a_problem(directory: CheckpointDirectory) -> None:
    _save(directory, 5)
    directory.write(path_in_step(5, "manifest.json"), b"{")
    (problem,) = catalog.verify(directory, 5)
    assert (problem.name, problem.damage) == ("manifest.json", Damage.UNREADABLE)


def test_a_manifest_that_the_medium_cannot_read_is_that_of_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_directory(str(tmp_path))
    for step in (5, 20):
        _save(directory, step)
    unreadable = FailingReads("manifest.json", errno.EIO, below="step-000000020")
    monkeypatch.setattr(directory_module, "os", unreadable)
    assert catalog.list_checkpoints(directory) == (20, 5)
    (problem,) = catalog.verify(directory, 20)
    assert problem.damage is Damage.UNREADABLE
    assert not catalog.verify(directory, 5)
    assert catalog.newest_step(directory) == 5, "what can be loaded"
    (tmp_path / path_in_step(5, "manifest.json")).unlink()
    assert catalog.newest_step(directory) == 0


def test_a_save_with_a_missing_or_wrong_file_is_not_committed(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    manifest = _write(directory, 5)
    (tmp_path / path_in_step(5, "structure.json")).unlink()
    with pytest.raises(CheckpointWriteError, match=r"structure.json is missing.*shared by"):
        catalog.commit(directory, manifest)
    directory.write(path_in_step(5, "structure.json"), b"longer")
    with pytest.raises(
        CheckpointWriteError, match="has 6 bytes, but 2 bytes were reported as written"
    ):
        catalog.commit(directory, manifest)
    assert catalog.list_checkpoints(directory) == ()


def test_the_directory_of_one_checkpoint_is_not_taken_for_one_of_several(
    directory: CheckpointDirectory,
) -> None:
    catalog.require_parent(directory)
    _save(directory, 80)
    catalog.require_parent(directory)
    one = f"{directory.url}/step-000000080"
    for _ in ("intact", "damaged"):
        with pytest.raises(ConfigurationError) as refused:
            catalog.require_parent(open_directory(one))
        assert str(refused.value) == (
            f"{one} is a checkpoint of step 80; give its parent directory, {directory.url}"
        )
        directory.write(path_in_step(80, "manifest.json"), b"{")
    directory.remove(path_in_step(80, "manifest.json"))
    with pytest.raises(ConfigurationError, match="an unfinished checkpoint of step 80; give its"):
        catalog.require_parent(open_directory(one))
    directory.write("manifest.json", b"{}")
    catalog.require_parent(directory)  # another program's file


def test_files_that_other_groups_left_are_swept(directory: CheckpointDirectory) -> None:
    manifest = _save(directory, 5)
    others = ["structure-g1-a.json", "shard-00000-of-00002-g1-a.safetensors"]
    for name in [*others, "notes.txt"]:
        directory.write(path_in_step(5, name), b"x")
        directory.write(path_in_step(6, name), b"x")
    assert sorted(catalog.sweep(directory, manifest)) == sorted(others)
    assert directory.list("step-000000005") == sorted(["manifest.json", "notes.txt", *CONTENTS])
    assert len(directory.list("step-000000006")) == 3
    assert catalog.sweep(directory, manifest) == []
    assert catalog.verify(directory, 5) == []


def test_pruning_keeps_the_newest_and_saves_in_progress(directory: CheckpointDirectory) -> None:
    for step in (1, 2, 4, 5):
        _save(directory, step)
    _write(directory, 3)
    _write(directory, 6)
    assert catalog.prune(directory, keep_last=2) == [1, 2, 3]
    assert catalog.scan(directory) == Catalog(committed=(5, 4), uncommitted=(6,))
    assert catalog.prune(directory, keep_last=2) == []


def test_pruning_goes_on_after_a_step_that_cannot_be_removed(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        _save(directory, step)
    remove = directory.remove_step

    def stubborn(name: str) -> None:
        if name == "step-000000001":
            raise CheckpointWriteError("removing it failed: Operation not permitted")
        remove(name)

    monkeypatch.setattr(directory, "remove_step", stubborn)
    with pytest.raises(CheckpointWriteError, match=r"steps 1\).*Operation not permitted"):
        catalog.prune(directory, keep_last=1)
    assert catalog.list_checkpoints(directory) == (4, 1)


def test_pruning_removes_nothing_before_the_first_commit(directory: CheckpointDirectory) -> None:
    _write(directory, 1)
    assert catalog.prune(directory, keep_last=1) == []
    assert catalog.scan(directory).uncommitted == (1,)


def test_pruning_never_removes_everything(directory: CheckpointDirectory) -> None:
    _save(directory, 1)
    with pytest.raises(AssertionError):
        catalog.prune(directory, keep_last=0)
    assert catalog.list_checkpoints(directory) == (1,)


def test_preparing_clears_an_earlier_attempt(directory: CheckpointDirectory) -> None:
    _save(directory, 1)
    _save(directory, 2)
    catalog.prepare(directory, 2)
    catalog.prepare(directory, 3)
    assert catalog.scan(directory) == Catalog(committed=(1,), uncommitted=())


def test_a_killed_prune_leaves_only_intact_checkpoints(directory: CheckpointDirectory) -> None:
    for step in range(1, 5):
        _save(directory, step)
    for operations in every_kill_point(limit=20):
        try:
            catalog.prune(DyingDirectory(directory, Countdown(operations)), keep_last=1)
            break
        except Killed:
            steps = catalog.list_checkpoints(directory)
            assert steps[0] == 4
            assert [catalog.verify(directory, step) for step in steps] == [[]] * len(steps)
    assert catalog.list_checkpoints(directory) == (4,)
