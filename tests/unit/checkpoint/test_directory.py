"""A checkpoint directory holds whole files only, on local paths and behind fsspec URLs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash

from elastic.checkpoint import directory as directory_module
from elastic.checkpoint.digest import CHUNK_BYTES
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import shard_name, structure_name
from elastic.errors import (
    CheckpointDamaged,
    CheckpointWriteError,
    ConfigurationError,
    TransientError,
)
from tests.unit.checkpoint.faults import Countdown, DyingOs, FailingReads, Killed


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "path":
            yield str(tmp_path / "some where" / "checkpoints")
        case "file":
            yield f"file://{tmp_path}/checkpoints"
        case _:
            yield "memory://bucket/checkpoints"
            fsspec.filesystem("memory").store.clear()
            fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture
def directory(url: str) -> CheckpointDirectory:
    return open_directory(url)


class TestContract:
    """The contract of local paths and of fsspec URLs."""

    def test_probe_creates_the_root_and_leaves_nothing(
        self, directory: CheckpointDirectory
    ) -> None:
        directory.probe()
        directory.probe()
        assert directory.list() == []

    @pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
    def test_a_written_file_is_read_back(self, directory: CheckpointDirectory, size: int) -> None:
        content = os.urandom(size)
        digest = directory.write("step-000000001/a", content)
        assert (digest.name, digest.size_bytes) == ("a", size)
        assert digest.xxh3_128 == xxhash.xxh3_128_hexdigest(content)
        assert directory.read("step-000000001/a") == content
        assert b"".join(map(bytes, directory.chunks("step-000000001/a"))) == content
        assert directory.size_bytes("step-000000001/a") == size

    def test_blocks_are_written_one_after_the_other(self, directory: CheckpointDirectory) -> None:
        blocks = [memoryview(b"one"), memoryview(b""), memoryview(b"two")]
        digest = directory.write("a", iter(blocks))
        assert directory.read("a") == b"onetwo"
        assert digest.xxh3_128 == xxhash.xxh3_128_hexdigest(b"onetwo")

    def test_an_older_file_is_replaced(self, directory: CheckpointDirectory) -> None:
        directory.write("s/a", b"old and longer")
        directory.write("s/a", b"new")
        assert directory.read("s/a") == b"new"

    def test_an_older_file_stays_without_replace(self, directory: CheckpointDirectory) -> None:
        directory.write("s/a", b"first", replace=False)
        with pytest.raises(FileExistsError):
            directory.write("s/a", b"second", replace=False)
        assert directory.read("s/a") == b"first"
        assert directory.list("s") == ["a"]

    def test_files_are_visible_through_another_opening_of_the_url(
        self, directory: CheckpointDirectory, url: str
    ) -> None:
        other = open_directory(url)
        assert other.list() == []
        directory.write("step-000000001/a", b"x")
        assert other.list() == ["step-000000001"]
        assert other.size_bytes("step-000000001/a") == 1

    def test_absent_files_are_reported_as_absent(self, directory: CheckpointDirectory) -> None:
        assert directory.list() == []
        assert directory.size_bytes("step-000000001/a") is None
        with pytest.raises(FileNotFoundError):
            directory.read("step-000000001/a")
        with pytest.raises(FileNotFoundError):
            list(directory.chunks("step-000000001/a"))
        directory.remove_step("step-000000001")

    def test_a_removed_step_is_gone_and_its_neighbour_is_not(
        self, directory: CheckpointDirectory
    ) -> None:
        shard = shard_name(0, 1, "g1-a")
        for step in ("step-000000001", "step-000000002"):
            for name in ("manifest.json", shard, structure_name("g1-a"), f".{shard}.1.partial"):
                directory.write(f"{step}/{name}", b"x")
        directory.remove_step("step-000000001")
        assert directory.list() == ["step-000000002"]
        assert directory.size_bytes("step-000000001/manifest.json") is None
        assert directory.read("step-000000002/manifest.json") == b"x"

    def test_what_others_have_put_into_a_step_stays(self, directory: CheckpointDirectory) -> None:
        for name in ("manifest.json", "notes.txt", "thesis/manifest.json"):
            directory.write(f"step-000000001/{name}", b"x")
        directory.remove_step("step-000000001")
        assert directory.list("step-000000001") == ["notes.txt", "thesis"]
        assert directory.read("step-000000001/thesis/manifest.json") == b"x"

    def test_a_file_that_is_too_long_is_not_read(self, directory: CheckpointDirectory) -> None:
        directory.write("a", b"four")
        assert directory.read("a", 4) == b"four"
        with pytest.raises(CheckpointDamaged, match=r"a has 4 bytes where at most 3 are expected"):
            directory.read("a", 3)

    def test_files_of_a_directory_are_listed_and_removed(
        self, directory: CheckpointDirectory
    ) -> None:
        assert directory.list("step-000000001") == []
        directory.remove("step-000000001/a")
        for name in ("a", "b"):
            directory.write(f"step-000000001/{name}", b"x")
        assert directory.list("step-000000001") == ["a", "b"]
        directory.remove("step-000000001/a")
        directory.remove("step-000000001/a")
        assert directory.list("step-000000001") == ["b"]
        assert directory.size_bytes("step-000000001/a") is None

    def test_a_failing_source_leaves_the_older_file(
        self, directory: CheckpointDirectory, url: str
    ) -> None:
        directory.write("s/a", b"old")

        def broken() -> Iterator[memoryview]:
            yield memoryview(b"new" * 1000)
            raise Killed

        with pytest.raises(Killed):
            directory.write("s/a", broken())
        assert directory.read("s/a") == b"old"
        file_system, root = fsspec.core.url_to_fs(url)
        assert [Path(name).name for name in file_system.ls(f"{root}/s", detail=False)] == ["a"]

    @pytest.mark.parametrize("operation", ["read", "size_bytes", "list"])
    def test_storage_that_stands_still_is_given_up(
        self,
        directory: CheckpointDirectory,
        monkeypatch: pytest.MonkeyPatch,
        operation: str,
    ) -> None:
        directory.write("s/a", b"x")
        answers = threading.Event()

        class Standing:
            def __getattr__(self, _: str) -> Any:
                answers.wait(60.0)
                raise OSError(errno.EIO, "it stood still")

        monkeypatch.setattr(directory_module, "_PATIENCE_S", 0.1)
        monkeypatch.setattr(directory_module, "_SLOWEST_BYTES_PER_S", 1 << 40)
        monkeypatch.setattr(directory_module, "os", Standing())
        monkeypatch.setattr(directory, "_fs", Standing(), raising=False)
        with pytest.raises(TransientError, match=r"has not ended within 0 s: .* stands still"):
            getattr(directory, operation)("s/a" if operation != "list" else "s")
        answers.set()


class TestOpening:
    @pytest.mark.parametrize("url", ["", "nosuchscheme://bucket/x"])
    def test_a_url_that_cannot_be_opened_is_a_configuration_error(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="checkpoint directory"):
            open_directory(url)

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(url: str) -> None:
            raise ImportError(f"install s3fs for {url}")

        monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
        with pytest.raises(ConfigurationError, match="install s3fs"):
            open_directory("s3://bucket/x")

    def test_a_relative_path_stays_when_the_process_changes_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        directory = open_directory("checkpoints")
        monkeypatch.chdir("/")
        directory.write("a", b"x")
        assert (tmp_path / "checkpoints" / "a").read_bytes() == b"x"


class TestLocal:
    def test_a_path_under_a_file_is_named_with_the_reason(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        for root in (tmp_path / "file", tmp_path / "file" / "below"):
            directory = open_directory(str(root))
            with pytest.raises(ConfigurationError, match=r"file.*Not a directory.*move it away"):
                directory.probe()
            with pytest.raises(CheckpointWriteError, match=r"Not a directory.*bytes free"):
                directory.write("step-000000001/a", b"x")

    def test_listing_what_can_be_no_directory_is_a_configuration_error(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("x")
        (tmp_path / "loop").symlink_to("loop")
        for name, reason in (
            ("file", "Not a directory"),
            ("loop", "Too many levels"),
            ("n" * 300, "File name too long"),
        ):
            with pytest.raises(ConfigurationError, match=reason):
                open_directory(str(tmp_path / name)).list()

    @pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
    def test_a_full_disk_fails_the_write_and_keeps_older_files(self, small_disk: Path) -> None:
        directory = open_directory(str(small_disk))
        directory.write("s/old", b"o" * 20_000)
        with pytest.raises(CheckpointWriteError, match=r"No space left on device.*bytes free"):
            directory.write("s/new", b"n" * 100_000)
        (small_disk / "filling").write_bytes(b"f" * shutil.disk_usage(small_disk).free)
        with pytest.raises(TransientError, match=r"No space left on device; free some space"):
            directory.probe()
        (small_disk / "filling").unlink()
        assert os.listdir(small_disk / "s") == ["old"]
        directory.write("s/new", b"n" * 20_000)  # the failed write left its space free
        assert directory.read("s/old") == b"o" * 20_000

    @pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
    def test_a_read_only_file_system_refuses_changes_but_is_read(self, small_disk: Path) -> None:
        directory = open_directory(str(small_disk))
        directory.write("s/old", b"old")
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(ConfigurationError, match=r"Read-only file system.*mount"):
            directory.probe()
        with pytest.raises(CheckpointWriteError, match="Read-only"):
            directory.remove_step("s")
        assert directory.read("s/old") == b"old"

    def test_data_is_synced_before_it_is_visible(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorder = RecordingOs()
        monkeypatch.setattr(directory_module, "os", recorder)
        open_directory(str(tmp_path)).write("s/a", b"x")
        partial = next(path for verb, path in recorder.calls if verb == "replace")
        written = str(tmp_path / "s" / partial)
        assert recorder.calls == [
            ("mkdir", "s"),
            ("fsync", str(tmp_path)),
            ("write", written),
            ("fsync", written),
            ("replace", partial),
            ("fsync", str(tmp_path / "s")),
        ]

    def test_the_manifest_is_removed_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = open_directory(str(tmp_path))
        others = [shard_name(0, 1, "g1-a"), structure_name("g1-a")]
        for name in ("manifest.json", *others):
            directory.write(f"s/{name}", b"x")
        # Three operations: opening the root and the step, and the manifest's removal.
        monkeypatch.setattr(directory_module, "os", DyingOs(Countdown(3)))
        with pytest.raises(Killed):
            directory.remove_step("s")
        assert sorted(os.listdir(tmp_path / "s")) == others

    @pytest.mark.parametrize(
        ("number", "expected"), [(5, CheckpointDamaged), (116, TransientError)]
    )
    def test_a_failed_read_is_damage_or_transient_depending_on_its_error(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
        expected: type[Exception],
    ) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "a").touch()
        monkeypatch.setattr(directory_module, "os", FailingReads("a", number))
        with pytest.raises(expected, match="s/a"):
            open_directory(str(tmp_path)).read("s/a")


class TestRemote:
    def test_a_refused_write_is_temporary_and_names_the_url(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = open_directory("memory://bucket/x")

        def refuse(*_: object, **__: object) -> Any:
            raise RuntimeError("slow down")

        monkeypatch.setattr(fsspec.filesystem("memory"), "open", refuse)
        with pytest.raises(CheckpointWriteError, match=r"memory://bucket/x/s/a.*slow down"):
            directory.write("s/a", b"x")
        with pytest.raises(ConfigurationError, match=r"memory://bucket/x.*slow down.*credentials"):
            directory.probe()
        with pytest.raises(TransientError, match="slow down"):
            list(directory.chunks("s/a"))

    def test_storage_that_refuses_connections_is_a_transient_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> Any:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

        monkeypatch.setattr(fsspec.filesystem("memory"), "open", refuse)
        with pytest.raises(TransientError, match=r"memory://bucket/x.*refused"):
            open_directory("memory://bucket/x").probe()


class RecordingOs:
    """Records the order in which files are changed, by path."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def mkdir(self, path: str, **options: int) -> None:
        self.calls.append(("mkdir", path))
        os.mkdir(path, **options)

    def write(self, handle: int, piece: memoryview) -> int:
        self.calls.append(("write", os.readlink(f"/proc/self/fd/{handle}")))
        return os.write(handle, piece)

    def fsync(self, handle: int) -> None:
        self.calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        os.fsync(handle)

    def replace(self, source: str, target: str, **options: int) -> None:
        self.calls.append(("replace", source))
        os.replace(source, target, **options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_only_one_of_several_simultaneous_writers_succeeds(tmp_path: Path) -> None:
    """The writers may be a leader that was paused and the one that leads now."""

    def write(number: int) -> bool:
        barrier.wait()
        try:
            directory.write("s/a", b"%d" % number * 1000, replace=False)
        except FileExistsError:
            return False
        return True

    for attempt in range(20):
        directory, barrier = open_directory(str(tmp_path / str(attempt))), threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(write, range(4)))
        assert written.count(True) == 1
        assert directory.read("s/a") == b"%d" % written.index(True) * 1000
        assert directory.list("s") == ["a"]


def test_an_older_file_stays_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    directory = open_directory(str(tmp_path))
    directory.write("a", b"first", replace=False)
    with pytest.raises(FileExistsError):
        directory.write("a", b"second", replace=False)
    assert directory.read("a") == b"first"
    assert directory.list() == ["a"]
