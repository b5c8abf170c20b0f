"""When there are too many logs of earlier runs, the oldest are removed, but none in use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.runtime.log_retention import ZYGOTE_LOG, hold, make_directory, prune

GONE = 2**22 + 1  # above every process id


def made(root: Path, name: str, size_bytes: int = 100, *, zygote: bool = True) -> Path:
    directory = root / name
    directory.mkdir(exist_ok=True)
    (directory / "w.log").write_bytes(b"x" * size_bytes)
    if zygote:
        (directory / ZYGOTE_LOG).touch()
    return directory


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def runs(root: Path) -> list[Path]:
    """Ten log directories of the job, oldest first; the last one is the current run's."""
    earlier = [made(root, f"digits-2026010{n}-000000-{GONE}") for n in range(1, 10)]
    return [*earlier, made(root, make_directory(root, "digits").name)]


def test_runs_that_begin_in_the_same_second_get_different_directories(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: GONE)  # as in containers that share a volume
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    logs = root / "logs"
    runs = [make_directory(logs, "digits") for _ in range(3)]
    assert left(logs) == {f"digits-20260101-000000-{GONE}{end}" for end in ("", ".2", ".3")}
    for run in runs:
        (run / ZYGOTE_LOG).touch()
    prune(runs[-1], "digits", runs=1, size_bytes=None)
    assert left(logs) == {runs[-1].name}


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_the_newest_runs_are_kept(root: Path, runs: list[Path]) -> None:
    removed = prune(runs[-1], "digits", runs=4, size_bytes=None)
    assert left(root) == {path.name for path in runs[-4:]}
    assert removed.directories == runs[-5::-1]
    assert (removed.size_bytes, removed.problems) == (600, [])


def test_the_oldest_runs_beyond_the_size_limit_are_removed(root: Path, runs: list[Path]) -> None:
    prune(runs[-1], "digits", runs=8, size_bytes=350)
    assert left(root) == {path.name for path in runs[-3:]}


def test_the_current_run_is_kept_even_above_the_size_limit(root: Path, runs: list[Path]) -> None:
    prune(runs[-1], "digits", runs=None, size_bytes=1)
    assert left(root) == {runs[-1].name}


def test_directories_not_made_by_a_run_of_this_job_are_kept(root: Path, runs: list[Path]) -> None:
    others = [
        made(root, f"digits-2-20260101-000000-{GONE}"),
        made(root, f"letters-20260101-000000-{GONE}"),
        made(root, "digits-notes"),
        made(root, f"digits-20260101-000000-{GONE}.bak"),
    ]
    (root / "digits-20260101-000000-1").write_text("a file")
    prune(runs[-1], "digits", runs=1, size_bytes=1)
    expected = {runs[-1].name, *(path.name for path in others), "digits-20260101-000000-1"}
    assert left(root) == expected


def test_symbolic_links_are_not_followed(root: Path, runs: list[Path], tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").touch()
    link = root / f"digits-20250101-000000-{GONE}"
    link.symlink_to(precious)
    (runs[0] / "inside").symlink_to(precious)
    prune(runs[-1], "digits", runs=1, size_bytes=None)
    assert link.is_symlink()
    assert not runs[0].exists()
    assert (precious / "thesis").exists()


def test_a_run_whose_agent_lives_is_kept(root: Path, runs: list[Path]) -> None:
    live = made(root, f"digits-20250101-000000-{os.getpid()}")
    prune(runs[-1], "digits", runs=1, size_bytes=1)
    assert left(root) == {runs[-1].name, live.name}


HOLDER = "import sys; print(1, flush=True); sys.stdin.read()"


def test_a_run_whose_workers_outlive_their_agent_is_kept(root: Path, runs: list[Path]) -> None:
    """The zygote has inherited the lock with its log file."""
    with (runs[0] / ZYGOTE_LOG).open("ab") as log:
        hold(log.fileno())
        zygote = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    with zygote:
        assert zygote.stdout is not None
        zygote.stdout.readline()
        prune(runs[-1], "digits", runs=1, size_bytes=None)
        assert left(root) == {runs[0].name, runs[-1].name}
        zygote.kill()
    prune(runs[-1], "digits", runs=1, size_bytes=None)
    assert left(root) == {runs[-1].name}


def test_a_run_that_has_just_begun_is_kept(root: Path, runs: list[Path]) -> None:
    """The young run may be in another container, so its process id says nothing."""
    young = made(root, f"digits-20250101-000000-{GONE}", zygote=False)
    old = made(root, f"digits-20250102-000000-{GONE}", zygote=False)
    os.utime(old, (0, 0))
    prune(runs[-1], "digits", runs=1, size_bytes=None)
    assert left(root) == {runs[-1].name, young.name}


def test_a_failed_removal_is_reported(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path / "w.log"))

    monkeypatch.setattr("elastic.runtime.log_retention.shutil.rmtree", refuse)
    removed = prune(runs[-1], "digits", runs=9, size_bytes=None)
    assert removed.directories == []
    assert removed.problems == [f"cannot remove {runs[0]}/w.log: Permission denied"]


def test_a_missing_directory_or_descriptor_raises_no_error(tmp_path: Path) -> None:
    present = tmp_path / "gone" / "digits-20260101-000000-1"
    assert prune(present, "digits", runs=1, size_bytes=1).directories == []
    hold(10**6)  # no such descriptor
