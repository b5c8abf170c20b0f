"""Run directories are private, found while their process lives, and swept once it was killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.errors import ConfigurationError, TransientError
from elastic.runtime.run_directory import RunDirectory, RunningJob, find_job


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place for run directories, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setattr("elastic.runtime.run_directory._LAST_RESORT", name)
        yield Path(name)


Make = Callable[[str], RunDirectory]


@pytest.fixture
def make(runtime: Path) -> Iterator[Make]:
    """Makes run directories there, and removes them after the test."""
    made: list[RunDirectory] = []

    def make(job: str) -> RunDirectory:
        made.append(RunDirectory(job))
        return made[-1]

    yield make
    assert runtime.exists()
    for directory in made:
        directory.remove()


def test_a_run_directory_is_private_and_removed_with_the_run(runtime: Path, make: Make) -> None:
    directory = make("digits")
    assert directory.path == runtime / f"elastic-{os.getuid()}" / f"digits-{os.getpid()}"
    for path in (directory.path, directory.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (directory.path / "agent.sock").touch()
    directory.remove()
    assert not directory.path.exists()


def test_find_job_returns_the_only_or_the_named_job(make: Make) -> None:
    with pytest.raises(TransientError, match="no job runs"):
        find_job(None)
    first = make("first")
    first.announce("unix:/first")
    expected = RunningJob(job="first", pid=os.getpid(), address="unix:/first")
    assert find_job(None) == find_job("first") == expected
    with pytest.raises(TransientError, match="'other'"):
        find_job("other")
    second = make("second")
    second.announce("unix:/second")
    assert find_job("second").address == "unix:/second"
    with pytest.raises(ConfigurationError, match=r"first.*second.*--job"):
        find_job(None)
    first.remove()
    assert find_job(None).job == "second"


def test_a_job_that_has_not_announced_itself_is_not_found(make: Make) -> None:
    make("digits")
    with pytest.raises(TransientError):
        find_job(None)


def test_the_directory_of_a_killed_run_is_no_job_and_is_swept(make: Make) -> None:
    script = (
        "import os, signal\n"
        "from elastic.runtime.run_directory import RunDirectory\n"
        "directory = RunDirectory('digits')\n"
        "directory.announce('unix:/nobody')\n"
        "print(directory.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert json.loads((left / "job.json").read_text())["address"] == "unix:/nobody"
    with pytest.raises(TransientError):
        find_job(None)
    beside = left.parent / "being-made"
    beside.mkdir()
    make("next")
    assert not left.exists()
    assert beside.exists()


def test_the_sweep_leaves_living_runs_alone(make: Make) -> None:
    first = make("first")
    make("second")
    assert first.path.exists()
    first.remove()


def test_a_place_whose_paths_are_too_long_for_sockets_is_passed_over(
    runtime: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's name counts towards the length; the job is found wherever its directory went."""
    long = runtime / ("x" * 50)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    short_name, long_name = make("j"), make("j" * 40)
    assert long in short_name.path.parents
    assert long not in long_name.path.parents
    long_name.announce("unix:/there")
    assert find_job("j" * 40).address == "unix:/there"


def test_a_job_with_a_long_name_gets_a_directory_and_is_found(make: Make) -> None:
    one, other = make("j" * 200), make("j" * 199 + "k")
    assert one.path != other.path
    assert len(str(one.path / "coordinator.sock")) <= 107
    one.announce("unix:/one")
    other.announce("unix:/other")
    assert find_job("j" * 200).address == "unix:/one"


@pytest.mark.parametrize("what", ["link", "open", "file"])
def test_a_place_that_others_may_have_prepared_is_refused(
    runtime: Path, make: Make, what: str
) -> None:
    base = runtime / f"elastic-{os.getuid()}"
    if what == "link":
        target = runtime / "target"
        target.mkdir(mode=0o700)
        base.symlink_to(target)
    elif what == "open":
        base.mkdir()
        base.chmod(0o777)
    else:
        base.touch()
    with pytest.raises(ConfigurationError, match="TMPDIR") as raised:
        make("digits")
    assert str(base) in str(raised.value)


STARTS = """
import sys
from elastic.runtime.run_directory import RunDirectory
for number in range(200):
    made = RunDirectory(f"job{number}")
    made.announce("unix:/here")
    assert made.path.joinpath("job.json").exists(), made.path
    made.remove()
"""


def test_a_starting_run_is_not_swept_by_another(runtime: Path) -> None:
    del runtime
    starting = [subprocess.Popen([sys.executable, "-c", STARTS]) for _ in range(3)]
    assert [process.wait(60.0) for process in starting] == [0, 0, 0]


def test_a_sweeper_that_keeps_its_lock_does_not_prevent_a_start(
    runtime: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.runtime.run_directory._LOCK_PATIENCE_S", 0.1)
    make("first")
    held = os.open(runtime / f"elastic-{os.getuid()}", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    make("second").announce("unix:/second")
    os.close(held)
    assert find_job("second").address == "unix:/second"


def test_files_removed_under_a_run_are_noticed_and_the_directory_made_again(make: Make) -> None:
    directory = make("digits")
    directory.announce("unix:/first")
    (directory.path / "agent.sock").touch()
    assert not directory.is_incomplete("agent.sock")
    (directory.path / "agent.sock").unlink()
    assert directory.is_incomplete("agent.sock")
    shutil.rmtree(directory.path.parent)
    assert directory.is_incomplete()
    directory.restore()
    directory.announce("unix:/second")
    assert not directory.is_incomplete()
    assert find_job("digits").address == "unix:/second"
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_a_run_directory_is_made_elsewhere_when_its_place_is_gone(
    make: Make, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example $XDG_RUNTIME_DIR, which is removed with the user's last session."""
    session = runtime / "session"
    session.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    directory = make("digits")
    assert directory.path.is_relative_to(session)
    shutil.rmtree(session)
    directory.restore()
    directory.announce("unix:/there")
    assert directory.path.parent.parent == runtime
    assert find_job("digits").address == "unix:/there"


def test_foreign_files_beside_run_directories_are_ignored(make: Make, runtime: Path) -> None:
    base = runtime / f"elastic-{os.getuid()}"
    base.mkdir(mode=0o700)
    (base / "file").touch()
    os.mkfifo(base / "pipe")
    (base / "link").symlink_to("/")
    for name in ("one", "two", "three", "four"):
        (base / name).mkdir()
    os.mkfifo(base / "one" / "job.json")
    (base / "two" / "job.json").mkdir()
    (base / "three" / "job.json").write_bytes(b"\xff\0")
    (base / "four" / "job.json").symlink_to("/etc/passwd")
    directory = make("digits")
    directory.announce("unix:/here")
    assert find_job(None).address == "unix:/here"
    assert Path("/etc/passwd").exists()


def test_a_full_disk_raises_a_transient_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make("digits")

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("elastic.runtime.run_directory.os.write", refuse)
    with pytest.raises(TransientError, match=rf"{directory.path}: No space left.*XDG_RUNTIME_DIR"):
        directory.announce("unix:/here")
