"""The keeper ends as its command does, and ends what the command leaves behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.runtime import keeper
from elastic.runtime.orphans import kill_descendants
from elastic.runtime.run_directory import RunDirectory
from elastic.runtime.training_lease import LAPSE_S, TrainingLease
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

    def start(
        code: str, directory: Path = tmp_path / "none", lease: TrainingLease | None = None
    ) -> subprocess.Popen[str]:
        page = (lease or TrainingLease.unlimited()).descriptor
        keeper = [sys.executable, "-m", "elastic.runtime.keeper", str(directory), str(page)]
        process = subprocess.Popen(
            [*keeper, *PYTHON, code],
            pass_fds=[page],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        kill_descendants(process.pid)
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


def is_zombie(pid: int) -> bool:
    """Whether it was killed: nobody reaps a worker here."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


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
    page = TrainingLease.unlimited().descriptor
    keeper = [sys.executable, "-m", "elastic.runtime.keeper", str(tmp_path / "none"), str(page)]
    process = subprocess.Popen(
        [*keeper, *PYTHON, code],
        pass_fds=[write, page],
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


# A command with a child in a process group of its own, as a worker, which has a child itself.
WORKER = """\
import os, sys, time
if os.fork() == 0:
    os.setpgid(0, 0)
    helper = os.fork()
    if helper != 0:
        print(os.getpid(), helper, flush=True)
    time.sleep(600)
time.sleep(600)
"""


def until_lapsed_s(lease: TrainingLease) -> float:
    """How long ago the lease was over; negative while it is not."""
    assert lease.valid_until is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (lease.valid_until + LAPSE_S)


def expiring(in_s: float) -> TrainingLease:
    lease = TrainingLease.new()
    lease.grant(time.clock_gettime(time.CLOCK_BOOTTIME) + in_s)
    return lease


@pytest.mark.parametrize("stopped", [False, True])
def test_the_keeper_ends_workers_whose_lease_is_over_even_stopped_ones(
    keep: Keep, stopped: bool
) -> None:
    lease = expiring(0.1)
    process = keep(WORKER, lease=lease)
    assert process.stdout is not None
    worker, helper = map(int, process.stdout.readline().split())
    if stopped:
        os.kill(worker, signal.SIGSTOP)
    while until_lapsed_s(lease) < -0.3:
        assert not is_zombie(worker)  # the agent may still renew the lease
        time.sleep(0.05)
    until(lambda: is_zombie(worker) and is_gone(helper))
    assert process.poll() is None
    assert until_lapsed_s(lease) >= 0.0


def test_the_keeper_lets_workers_live_whose_lease_was_not_granted_or_is_renewed(
    keep: Keep,
) -> None:
    fresh, renewed = TrainingLease.new(), expiring(0.1)
    first, second = keep(WORKER, lease=fresh), keep(WORKER, lease=renewed)
    workers = []
    for process in (first, second):
        assert process.stdout is not None
        workers.append(int(process.stdout.readline().split()[0]))
    renewed.grant(time.clock_gettime(time.CLOCK_BOOTTIME) + 600.0)
    third = keep(WORKER, lease=expiring(0.1))  # it shows that enough time has passed
    assert third.stdout is not None
    ended = int(third.stdout.readline().split()[0])
    until(lambda: is_zombie(ended))
    assert not any(map(is_zombie, workers))


def test_workers_of_the_next_lease_are_not_ended_with_those_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent may begin the next one between two looks of the keeper."""
    lease = expiring(-LAPSE_S - 1.0)
    ended: list[int] = []

    def children(parent: int) -> list[int]:
        assert parent == 1234
        lease.begin_epoch()
        return [5678]

    monkeypatch.setattr(keeper, "children", children)
    monkeypatch.setattr(os, "kill", lambda pid, _: ended.append(pid))
    keeper._end_workers(1234, lease)
    assert ended == []


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
