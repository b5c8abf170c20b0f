"""A killed process is noticed before its memory is freed, and only if it is killed by itself."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic.runtime.death_notice import DeathNotice

HOLDS = "from elastic.runtime.death_notice import hold; hold(); "
READY = "import os; print(os.getpid(), flush=True); "
SLEEPS = "import time; time.sleep(100)"


class Started:
    """Processes that run some code, and say when they are ready."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, code: str) -> int:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline())

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def told(notice: DeathNotice) -> int:
    """What the notice tells, within some seconds."""
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(notice.wait()), daemon=True)
    waiting.start()
    waiting.join(20.0)
    assert found, "nothing was told"
    return found[0]


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    started.end()


def test_a_kill_is_noticed_before_the_memory_is_freed(start: Started) -> None:
    """At the first of some attempts, unless the machine is busy."""
    fill = "room = bytearray(2**30); room[::4096] = b'1' * len(room[::4096]); "
    for _ in range(5):
        pid = start(fill + HOLDS + READY + SLEEPS)
        notice, descriptor = DeathNotice(pid), os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert told(notice) == signal.SIGKILL
        ended, _, _ = select.select([descriptor], [], [], 0.0)
        os.close(descriptor)
        if not ended:
            return
    raise AssertionError("the process had ended each time")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV])
def test_the_signal_is_told(start: Started, number: int) -> None:
    pid = start(HOLDS + READY + SLEEPS)
    notice = DeathNotice(pid)
    os.kill(pid, number)
    assert told(notice) == number


@pytest.mark.parametrize(
    "ends",
    ["raise SystemExit(3)", "os.execv('/bin/sleep', ['sleep', '100'])"],
    ids=["exits", "runs another program"],
)
def test_an_end_by_itself_is_no_signal(start: Started, ends: str) -> None:
    notice = DeathNotice(start(f"{HOLDS}{READY}input(); {ends}"))
    stdin = start.processes[0].stdin
    assert stdin is not None
    stdin.write("\n")
    stdin.flush()
    assert told(notice) == 0


def test_a_death_with_the_parent_is_left_to_who_knows_of_that(start: Started) -> None:
    dies_with_it = "import ctypes; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG
    child = dies_with_it + HOLDS + READY + SLEEPS
    notice = DeathNotice(start(f"import os, time\nif os.fork() == 0:\n    {child}\n{SLEEPS}"))
    start.processes[0].kill()
    assert told(notice) == 0


def test_a_fork_of_the_process_does_not_count(start: Started) -> None:
    """Loader processes inherit the page, and end before their worker."""
    forks = "import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n"
    pid = start(HOLDS + forks + READY + SLEEPS)
    notice = DeathNotice(pid)
    os.kill(pid, signal.SIGTERM)
    assert told(notice) == signal.SIGTERM


def test_a_process_that_holds_nothing_is_told_apart(start: Started) -> None:
    pid = start(READY + SLEEPS)
    with pytest.raises(FileNotFoundError, match=str(pid)):
        DeathNotice(pid)
