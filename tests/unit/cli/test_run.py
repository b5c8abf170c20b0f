"""`elastic run`: what it gives to its workers, what signals do, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cli import launch, run
from elastic.cli.launch import log_directory, worker_environment
from elastic.cli.run import (
    Command,
    _job_options,
    node_options,
)
from elastic.errors import ConfigurationError, TransientError
from elastic.runtime import leave_signals
from elastic.settings.run import RunSettings
from elastic.settings.shared import Launch


def test_workers_inherit_no_secret_of_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_PASSWORD", "hunter2")
    monkeypatch.setenv("ELASTIC_ETCD_USER", "me")
    monkeypatch.setenv("WANDB_API_KEY", "the script's own")
    environment = worker_environment(2, "127.0.0.1", classic=False)
    assert "hunter2" not in environment.values()
    assert environment["ELASTIC_ETCD_USER"] == "me"
    assert environment["WANDB_API_KEY"] == "the script's own"


def test_silence_and_hang_timeouts_are_independent(tmp_path: Path) -> None:
    settings = RunSettings(hang_timeout_s=3.0, silence_timeout_s=7.0, launch=Launch.ELASTIC)
    command = Command(settings=settings, argv=["train.py"])
    assert _job_options(command, None).stall.floor_s == 3.0
    assert node_options(command, tmp_path, tmp_path).settings.silence_timeout_s == 7.0


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, TransientError), (errno.EACCES, ConfigurationError)]
)
def test_a_full_disk_is_transient_and_a_forbidden_log_dir_a_configuration_error(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise OSError(number, "it is so")

    monkeypatch.setattr(launch, "make_directory", refuse)
    with pytest.raises(kind, match="it is so; choose another with --log-dir"):
        log_directory("job", tmp_path)


class LeavingAgent:
    """An agent that records how it is asked to leave or stop."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, str]] = []

    def leave(self, exit_code: int, reason: str) -> None:
        self.asked.append(("leave", int(exit_code), reason))

    def stop(self, exit_code: int) -> None:
        self.asked.append(("stop", int(exit_code), ""))


@pytest.fixture
def hangup() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def signalled(*numbers: int) -> list[tuple[str, int, str]]:
    agent: Any = LeavingAgent()

    async def main() -> None:
        run._handle_signals(agent)
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)

    asyncio.run(main())
    return list(agent.asked)


@pytest.mark.usefixtures("hangup")
def test_repeated_sighup_saves_and_leaves_once() -> None:
    assert signalled(signal.SIGHUP, signal.SIGHUP) == [("leave", 143, "SIGHUP")]


def test_the_same_signal_twice_at_once_saves_and_leaves() -> None:
    """timeout(1) signals its command and then the command's process group."""
    assert signalled(signal.SIGTERM, signal.SIGTERM) == [("leave", 143, "SIGTERM")]


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_signal_that_would_end_the_process_saves_and_leaves(number: signal.Signals) -> None:
    assert signalled(number) == [("leave", 143, number.name)]


def test_the_signal_that_restarts_agents_saves_and_leaves() -> None:
    assert signalled(leave_signals.RESTART_SIGNAL) == [("leave", 143, "SIGRTMIN+1")]


def test_a_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave_signals, "ONE_SIGNAL_S", 0.0)
    asked = signalled(signal.SIGINT, signal.SIGINT)
    assert asked == [("leave", 130, "Ctrl-C"), ("stop", 130, "")]


@pytest.mark.usefixtures("hangup")
def test_another_signal_after_sighup_stops_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leave_signals, "ONE_SIGNAL_S", 0.0)
    asked = signalled(signal.SIGHUP, signal.SIGTERM)
    assert asked == [("leave", 143, "SIGHUP"), ("stop", 143, "")]


@pytest.mark.usefixtures("hangup")
def test_sighup_is_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signalled(signal.SIGHUP) == []


@pytest.mark.parametrize("says_so", [True, False])
async def test_run_waits_a_limited_time_for_the_coordinators_exit_code(
    says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_END_TIMEOUT_S", 5.0 if says_so else 0.01)
    loop = asyncio.get_running_loop()
    agent: Any = SimpleNamespace(ended=loop.create_future())
    coordinator: Any = SimpleNamespace(ended=loop.create_future())
    agent.ended.set_result(130)
    if says_so:
        loop.call_later(0.05, coordinator.ended.set_result, 84)
    await run._wait_for_end(agent, coordinator)
    assert coordinator.ended.done() == says_so
