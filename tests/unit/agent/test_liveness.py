"""Silent workers are given up: soon if the kernel calls them stopped, else after a timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic.agent.worker_server import STOPPED_AFTER_S, Liveness

SOON = STOPPED_AFTER_S + 0.1


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import sys; sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process, and wait until it is stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_a_stopped_process_is_given_up_soon(child: subprocess.Popen[bytes]) -> None:
    liveness = Liveness(silence_s=60.0, compiling_s=600.0)
    liveness.heard("w", child.pid, now=100.0)
    assert liveness.silent(100.0 + SOON) == []
    stop(child)
    assert liveness.silent(100.0 + STOPPED_AFTER_S - 0.1) == []
    assert liveness.silent(100.0 + SOON) == [("w", pytest.approx(SOON))]
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert liveness.silent(100.0 + SOON) == []


def test_a_running_process_is_given_up_after_a_timeout(child: subprocess.Popen[bytes]) -> None:
    liveness = Liveness(silence_s=60.0, compiling_s=600.0)
    liveness.heard("w", child.pid, now=0.0)
    assert liveness.silent(59.9) == []
    assert liveness.silent(60.0) == [("w", 60.0)]
    liveness.heard("w", child.pid, now=60.0)
    assert liveness.silent(61.0) == []


def test_with_no_limit_only_stopped_processes_are_given_up(child: subprocess.Popen[bytes]) -> None:
    liveness = Liveness(silence_s=0.0, compiling_s=600.0)
    liveness.heard("w", child.pid, now=0.0)
    assert liveness.silent(1e6) == []
    stop(child)
    assert liveness.silent(1e6) == [("w", 1e6)]


def test_a_process_that_is_gone_is_not_reported_as_silent(child: subprocess.Popen[bytes]) -> None:
    """The zygote reports its exit."""
    child.kill()
    child.wait()
    liveness = Liveness(silence_s=60.0, compiling_s=600.0)
    liveness.heard("w", child.pid, now=0.0)
    assert liveness.silent(10.0) == []


def test_forgotten_workers_are_not_reported_as_silent() -> None:
    liveness = Liveness(silence_s=1.0, compiling_s=600.0)
    liveness.heard("a", os.getpid(), now=0.0)
    liveness.heard("b", os.getpid(), now=0.0)
    liveness.forget("a")
    liveness.forget("unknown")
    assert [worker for worker, _ in liveness.silent(10.0)] == ["b"]


@pytest.mark.parametrize(
    ("silence_s", "compiling_s", "given_up_after_s"),
    [(60.0, 600.0, 600.0), (60.0, 5.0, 60.0), (60.0, 0.0, None), (0.0, 600.0, None)],
)
def test_a_compiling_process_is_given_up_after_the_longer_of_two_timeouts(
    child: subprocess.Popen[bytes],
    silence_s: float,
    compiling_s: float,
    given_up_after_s: float | None,
) -> None:
    liveness = Liveness(silence_s, compiling_s)
    liveness.heard("w", child.pid, now=0.0, compiling=True)
    if given_up_after_s is None:
        assert liveness.silent(1e6) == []
        return
    assert liveness.silent(given_up_after_s - 0.1) == []
    assert liveness.silent(given_up_after_s) == [("w", given_up_after_s)]
    liveness = Liveness(silence_s, compiling_s)
    liveness.heard("w", child.pid, now=1000.0)
    assert liveness.silent(1000.0 + silence_s) == [("w", silence_s)]


def test_time_without_a_look_is_no_silence(child: subprocess.Popen[bytes]) -> None:
    liveness = Liveness(silence_s=60.0, compiling_s=600.0)
    liveness.heard("w", child.pid, now=0.0)
    assert liveness.silent(0.5) == []
    stop(child)
    assert liveness.silent(3600.0) == []  # the whole node was stopped, and goes on
    assert liveness.silent(3600.5) == []
    assert liveness.silent(3601.0) == [("w", pytest.approx(1.5))]  # but this process does not


def test_a_worker_silent_before_and_after_a_pause_is_given_up(
    child: subprocess.Popen[bytes],
) -> None:
    liveness = Liveness(silence_s=3.0, compiling_s=600.0)
    liveness.heard("w", child.pid, now=0.0)
    assert liveness.silent(1.0) == liveness.silent(2.0) == []
    assert liveness.silent(100.0) == liveness.silent(100.5) == []
    assert liveness.silent(101.0) == [("w", pytest.approx(3.0))]
