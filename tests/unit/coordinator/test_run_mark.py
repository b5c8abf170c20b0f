"""A file is written by one run at a time, and by any of its leaders."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.step_recorder import _PLACES, Mark, WrittenByAnother

MARKS = """\
import sys, time
from pathlib import Path
from elastic.coordinator.step_recorder import Mark
mark = Mark(sys.argv[1])
mark.set(Path(sys.argv[2]))
print("marked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


@pytest.fixture
def leader(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of the run "first" that has marked the file."""
    command = [sys.executable, "-c", MARKS, "first", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "marked\n"
        yield process
        process.kill()


def test_a_file_is_marked_by_one_run_until_it_removes_the_mark(path: Path) -> None:
    first, second = Mark("first"), Mark("second")
    first.set(path)
    first.set(path)
    for _ in range(2):
        with pytest.raises(WrittenByAnother):
            second.set(path)
    first.remove()
    second.set(path)
    with pytest.raises(WrittenByAnother):
        first.set(path)
    second.remove()


@pytest.mark.parametrize(("place", "other"), [(0, 1), (_PLACES - 1, 0), (5, _PLACES - 1)])
def test_every_place_of_another_run_is_seen(path: Path, place: int, other: int) -> None:
    first, second = Mark("first"), Mark("second")
    first._place, second._place = place, other
    for one, another in ((first, second), (second, first)):
        one.set(path)
        with pytest.raises(WrittenByAnother):
            another.set(path)
        one.remove()


def test_the_next_leader_of_a_run_writes_though_the_one_before_is_frozen(
    path: Path, leader: subprocess.Popen[str]
) -> None:
    leader.send_signal(signal.SIGSTOP)
    own, other = Mark("first"), Mark("second")
    own.set(path)
    with pytest.raises(WrittenByAnother):
        other.set(path)
    leader.kill()
    leader.wait()
    with pytest.raises(WrittenByAnother):
        other.set(path)
    own.remove()


def test_a_process_that_is_killed_leaves_no_mark(path: Path, leader: subprocess.Popen[str]) -> None:
    other = Mark("second")
    with pytest.raises(WrittenByAnother):
        other.set(path)
    leader.kill()
    leader.wait()
    other.set(path)
    other.remove()


def test_what_is_no_regular_file_gets_no_mark(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), tmp_path / "missing"):
        for run in ("first", "second"):
            Mark(run).set(path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_written_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for run in ("first", "second"):
        mark = Mark(run)
        mark.set(path)
        mark.remove()
