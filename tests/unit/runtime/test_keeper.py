"""The keeper ends as its command does, and ends what the command leaves behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.runtime.run_directory import RunDirectory
from tests.unit.runtime.test_run_directory import runtime
from tests.waiting import eventually

__all__ = ["runtime"]
PYTHON = [sys.executable, "-S", "-c"]
DEADLINE_S = 60.0

Keep = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Starts a keeper with a Python command."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, directory: Path = tmp_path / "none") -> subprocess.Popen[str]:
        keeper = [sys.executable, "-m", "elastic.runtime.keeper", str(directory)]
        process = subprocess.Popen(
            [*keeper, *PYTHON, code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


until = functools.partial(eventually, deadline_s=DEADLINE_S)


def pid_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("code", [0, 3])
def test_the_keeper_ends_with_the_commands_exit_code(keep: Keep, code: int) -> None:
    assert keep(f"raise SystemExit({code})").wait(DEADLINE_S) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_keeper_ends_by_the_commands_signal(keep: Keep, number: signal.Signals) -> None:
    process = keep(f"import os; os.kill(os.getpid(), {int(number)})")
    assert process.wait(DEADLINE_S) == -number


def test_processes_that_the_command_leaves_behind_are_ended(keep: Keep) -> None:
    """This one is detached, in a session of its own, and ignores SIGTERM."""
    process = keep(
        "import os, signal, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "time.sleep(0.2)"
    )
    pid = pid_of(process)
    assert process.wait(DEADLINE_S) == 0
    assert is_gone(pid)


def test_the_command_ends_when_its_keeper_is_killed(keep: Keep) -> None:
    process = keep("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    pid = pid_of(process)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: is_gone(pid))


def test_the_keeper_keeps_no_descriptors_of_the_command(tmp_path: Path) -> None:
    """So the command's sockets close when the command ends."""
    read, write = os.pipe()
    code = f"import os, time; os.close({write}); print(os.getpid(), flush=True); time.sleep(600)"
    keeper = [sys.executable, "-m", "elastic.runtime.keeper", str(tmp_path / "none")]
    process = subprocess.Popen(
        [*keeper, *PYTHON, code],
        pass_fds=[write],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        os.close(write)
        pid_of(process)
        assert os.read(read, 1) == b""  # nobody else has the other end
    finally:
        os.close(read)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_directory_of_a_run_that_is_over_is_removed(keep: Keep, runtime: Path) -> None:
    del runtime
    living = RunDirectory("living")
    living.announce("unix:/x")
    over = living.path.parent / "over"
    over.mkdir()
    (over / "job.json").write_text("{}")
    for directory in (over, living.path):
        assert keep("pass", directory).wait(DEADLINE_S) == 0
    assert not over.exists()
    assert living.path.exists()
    living.remove()
