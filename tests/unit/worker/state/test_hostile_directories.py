"""Whatever stands in a checkpoint directory, nothing outside of it is read, written or removed, and
the last whole checkpoint is loaded."""

from __future__ import annotations

import json
import os
import socket
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.checkpoint import catalog, documents
from elastic.checkpoint import manifest as manifests
from elastic.checkpoint.catalog import Owner
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import (
    MANIFEST,
    path_in_step,
    shard_name,
    step_directory_name,
    structure_name,
)
from elastic.errors import CheckpointDamaged, CheckpointWriteError, ElasticError
from elastic.worker.state.shards import load_latest
from elastic.worker.state.tree import unflatten
from tests.unit.worker.saving import GROUP, make_state, save
from tests.unit.worker.trees import same

SPARSE_BYTES = 64 << 30
MOST_BYTES = 64 << 20
NEWEST, OLDER = 20, 10
FILES = (MANIFEST, structure_name(GROUP), shard_name(0, 2, GROUP), shard_name(1, 2, GROUP))
NEXT_TO_THEM = (f".{FILES[2]}.0.partial", "notes.txt")
OWNER = Owner(job="job", run="run", since_unix_s=1.0)


class Scene:
    """A directory with two checkpoints, and another one with files that concern nobody."""

    def __init__(self, files: Path) -> None:
        self.root, self.outside = files / "checkpoints", files / "outside"
        self.directory: CheckpointDirectory = open_directory(str(self.root))
        catalog.claim(self.directory, OWNER)
        for step in (OLDER, NEWEST):
            save(self.directory, step, make_state(step))
        (self.outside / "below").mkdir(parents=True)
        for path in (self.outside / "thesis", self.outside / "below" / MANIFEST):
            path.write_text("years of work")
        self._before = self._outside()

    @property
    def newest(self) -> Path:
        return self.root / step_directory_name(NEWEST)

    def _outside(self) -> dict[str, Any]:
        found = {}
        for path in [self.outside, *self.outside.rglob("*")]:
            content = path.read_text() if path.is_file() else sorted(os.listdir(path))
            found[str(path)] = (content, path.lstat().st_mode, path.lstat().st_mtime_ns)
        return found

    def judge(self, expected: int) -> None:
        """Load, look, save and prune as jobs and operators do."""
        tracemalloc.start()
        damaged: list[int] = []
        try:
            loaded = load_latest(self.directory, lambda step, _: damaged.append(step))
            for step in catalog.list_checkpoints(self.directory):
                catalog.verify(self.directory, step)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
        finally:
            tracemalloc.stop()
        assert loaded is not None
        assert loaded.manifest.step == expected
        state = unflatten(loaded.structure.skeleton, loaded.tensors)
        assert same(state, make_state(expected))
        assert damaged == ([] if expected == NEWEST else [NEWEST])
        self.go_on()

    def go_on(self) -> None:
        """The next run claims the directory, saves and prunes until only its own are left."""
        assert catalog.claim(self.directory, Owner(job="job", run="b", since_unix_s=2.0)) in (
            OWNER,
            None,
        )
        for step in (NEWEST + 10, NEWEST + 20):
            save(self.directory, step, make_state(step), group="g1-b")
            catalog.prune(self.directory, keep_last=1)
        assert catalog.list_checkpoints(self.directory) == (NEWEST + 20,)
        assert self._outside() == self._before


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def _to(target: Callable[[Scene], Path | str]) -> Callable[[Scene, Path], None]:
    return lambda scene, path: path.symlink_to(target(scene))


def _to_its_own_file(scene: Scene, path: Path) -> None:
    """The file was moved elsewhere and linked back."""
    twin = scene.root / step_directory_name(OLDER) / path.name
    path.symlink_to(twin if twin.exists() else scene.root)


def _socket(_: Scene, path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(_: Scene, path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


def _device(minor: int) -> Callable[[Scene, Path], None]:
    return lambda _, path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, minor))


PUT: dict[str, Callable[[Scene, Path], None]] = {
    "link to a file": _to(lambda scene: scene.outside / "thesis"),
    "link to a directory": _to(lambda scene: scene.outside),
    "relative link": _to(lambda _: "../../outside/thesis"),
    "link to nothing": _to(lambda scene: scene.outside / "absent"),
    "link to itself": lambda _, path: path.symlink_to(path.name),
    "link to a whole file": _to_its_own_file,
    "link to zeros": _to(lambda _: "/dev/zero"),
    "pipe": lambda _, path: os.mkfifo(path),
    "socket": _socket,
    "directory": lambda _, path: path.mkdir(),
    "sparse": _sparse,
    "empty": lambda _, path: path.touch(),
}
if os.getuid() == 0:
    PUT |= {"null": _device(3), "zeros": _device(5)}


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()


@pytest.mark.parametrize("what", PUT)
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_leads_outside_or_has_no_end(
    scene: Scene, name: str, what: str
) -> None:
    _remove(scene.newest / name)
    PUT[what](scene, scene.newest / name)
    if (name, what) == (MANIFEST, "directory"):
        with pytest.raises(CheckpointWriteError, match=r"steps 20.*Is a directory"):
            scene.judge(OLDER)
    else:
        scene.judge(OLDER)


@pytest.mark.parametrize("what", PUT)
@pytest.mark.parametrize("name", NEXT_TO_THEM)
def test_what_stands_beside_the_files_does_no_harm(scene: Scene, name: str, what: str) -> None:
    PUT[what](scene, scene.newest / name)
    scene.judge(NEWEST)


@pytest.mark.parametrize("what", PUT)
def test_a_file_of_owners_that_is_none_is_replaced(scene: Scene, what: str) -> None:
    owner = scene.root / catalog.OWNER
    if what != "directory":
        owner.unlink()
        PUT[what](scene, owner)
        scene.judge(NEWEST)
        assert stat.S_ISREG(owner.lstat().st_mode)


@pytest.mark.parametrize("target", ["outside", "archive", "absent", "itself"])
def test_a_step_that_is_a_link_is_unlinked_at_most(scene: Scene, target: str) -> None:
    """Also one that was moved to an archive and linked back: who needs it moves it back."""
    archive = scene.outside.parent / "archive"
    os.rename(scene.newest, archive)
    kept = sorted(os.listdir(archive))
    places = {"outside": scene.outside, "archive": archive, "itself": scene.newest}
    scene.newest.symlink_to(places.get(target, "absent"))
    with pytest.raises(ElasticError, match="symbolic link"):
        catalog.read_manifest(scene.directory, NEWEST)
    scene.judge(OLDER)
    assert sorted(os.listdir(archive)) == kept
    assert not scene.newest.is_symlink()


def test_a_directory_with_nothing_but_links_is_no_empty_one(scene: Scene) -> None:
    """A job that took it for one would begin anew."""
    for step in (OLDER, NEWEST):
        path = scene.root / step_directory_name(step)
        path.rename(scene.outside.parent / path.name)
        path.symlink_to(scene.outside.parent / path.name)
    with pytest.raises(CheckpointDamaged, match=r"none of the 2.*symbolic link"):
        load_latest(scene.directory, lambda *_: None)


def test_the_root_itself_may_be_a_link(scene: Scene) -> None:
    linked = scene.outside.parent / "linked"
    linked.symlink_to(scene.root)
    scene.directory = open_directory(str(linked))
    scene.judge(NEWEST)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../../outside/thesis",
        "/etc/passwd",
        "shard-00000-of-00002-g1-run.safetensors/../../../outside/thesis",
        "shard-00000-of-00002-g1-run.safetensors\0",
        "shard-00000-of-00002-g1-run.safetensors\n",
        "\x1b[2Jstructure.json",
        "file:///etc/passwd",
        "~root",
        "",
        "thesis",
        "shard-99999999999999999999-of-99999999999999999999-g1-run.safetensors",
    ],
)
@pytest.mark.parametrize("also_signed", [False, True])
def test_a_manifest_names_files_of_its_step_only(
    scene: Scene, name: str, also_signed: bool
) -> None:
    _rewrite(scene, also_signed, lambda files: files.append({**files[0], "name": name}))
    scene.judge(OLDER)


@pytest.mark.parametrize("size", [0, 1, -1, 1 << 40, 1 << 70, 1.5, "many", None])
@pytest.mark.parametrize("index", [0, 1])
def test_a_manifest_with_sizes_that_nobody_has_written(
    scene: Scene, index: int, size: object
) -> None:
    _rewrite(scene, True, lambda files: files[index].update(size_bytes=size))
    scene.judge(OLDER)


def test_shards_that_are_longer_than_the_tensors_are_not_read(scene: Scene) -> None:
    """The manifest and its file agree."""
    _rewrite(scene, True, lambda files: _last_shard(files).update(size_bytes=SPARSE_BYTES))
    os.truncate(scene.newest / FILES[3], SPARSE_BYTES)
    damaged: list[str] = []
    loaded = load_latest(scene.directory, lambda _, reason: damaged.append(reason))
    assert loaded is not None
    assert loaded.manifest.step == OLDER
    assert "the manifest lists shards of" in damaged[0]


def test_a_step_that_is_swapped_while_it_is_read_is_not_followed(scene: Scene) -> None:
    """Verified, then replaced by a link to a twin whose files have the same names."""
    assert not catalog.verify(scene.directory, NEWEST)
    os.rename(scene.newest, scene.outside.parent / "twin")
    scene.newest.symlink_to(scene.outside.parent / "twin")
    scene.judge(OLDER)


def _last_shard(files: list[dict[str, Any]]) -> dict[str, Any]:
    return next(f for f in files if f["name"] == FILES[3])


def _rewrite(
    scene: Scene, also_signed: bool, change: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Change the list of files in the newest manifest. also_signed: make its checksum fit."""
    path = scene.root / path_in_step(NEWEST, MANIFEST)
    document = json.loads(path.read_bytes())
    change(document["files"])
    if also_signed:
        body = {key: value for key, value in document.items() if key != manifests._CHECKSUM}
        document[manifests._CHECKSUM] = manifests._checksum(body)
    path.write_bytes(documents.encode(document))
