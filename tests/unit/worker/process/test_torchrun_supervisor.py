"""How the supervisor of a script written for torchrun handles the agent's messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.core.membership import FailureKind
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb
from elastic.worker.link import Link
from elastic.worker.process.torchrun import ClassicScript, _ScriptSupervisor
from tests.job_process import DIE_WITH_PARENT


class Sent:
    """A link that keeps what would be sent."""

    worker = "a0"

    def __init__(self) -> None:
        self.messages: list[pb.WorkerMessage] = []

    def send(self, **kind: Any) -> None:
        self.messages.append(pb.WorkerMessage(**kind))

    def hello(self) -> None:
        pass

    def start(self, *_: object) -> None:
        pass


class Script(ClassicScript):
    """A process that only waits. A request to end goes to it, not to the tests' process group."""

    def __init__(self) -> None:
        command = [*DIE_WITH_PARENT, "sh", "-c", "read line; exit 3"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.pid = self._process.pid
        super().__init__(self.pid, -1)

    def fail(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def script() -> Iterator[Script]:
    with contextlib.closing(Script()) as script:
        yield script


@pytest.fixture
def link() -> Sent:
    return Sent()


@pytest.fixture
def supervisor(script: Script, link: Sent, tmp_path: Path) -> Iterator[_ScriptSupervisor]:
    supervisor = _ScriptSupervisor(cast("Link", link), script, "train.py", tmp_path / "error.json")
    yield supervisor
    supervisor._command(pb.WorkerCommand(dismiss=pb.Dismiss()))  # ends its thread


TERMINATE = pb.WorkerCommand(terminate=pb.Terminate())


def failures(link: Sent) -> list[tuple[int, str]]:
    found = [m.failure for m in link.messages if m.WhichOneof("kind") == "failure"]
    return [(f.kind, f.message) for f in found]


@pytest.mark.parametrize(
    ("ended", "kinds"),
    [
        ("exit code before", [FailureKind.EXIT_CODE]),
        ("SIGKILL before", [FailureKind.SIGNAL]),
        ("SIGKILL after", [FailureKind.SIGNAL]),
        ("as asked", []),
    ],
)
def test_a_script_asked_to_end_is_reported_only_if_something_else_ended_it(
    supervisor: _ScriptSupervisor, script: Script, link: Sent, ended: str, kinds: list[FailureKind]
) -> None:
    if ended == "exit code before":
        script.fail()
    if ended == "SIGKILL before":
        os.kill(script.pid, signal.SIGKILL)
    if ended.endswith("before"):
        os.waitid(os.P_PID, script.pid, os.WEXITED | os.WNOWAIT)
    if ended == "SIGKILL after":
        os.kill(script.pid, signal.SIGSTOP)  # so that SIGTERM does not end it
        os.waitid(os.P_PID, script.pid, os.WSTOPPED | os.WNOWAIT)
    supervisor._command(TERMINATE)
    if ended == "SIGKILL after":
        os.kill(script.pid, signal.SIGKILL)
    supervisor.run()
    assert [kind for kind, _ in failures(link)] == [kind.value for kind in kinds]


def test_an_exception_raised_before_the_script_was_asked_to_end_is_reported(
    supervisor: _ScriptSupervisor, link: Sent, tmp_path: Path
) -> None:
    recorded = {"message": "ValueError: no such corpus", "errorCode": 1}
    (tmp_path / "error.json").write_text(json.dumps({"message": recorded}))
    supervisor._command(TERMINATE)  # while the interpreter shuts down
    supervisor.run()
    assert failures(link) == [(FailureKind.EXCEPTION.value, "ValueError: no such corpus")]


def test_a_repeated_assignment_of_a_slot_is_ignored(
    supervisor: _ScriptSupervisor, link: Sent
) -> None:
    supervisor._machine.attached()
    told = pb.WorkerCommand(assignment=pb.Assignment(slot=1))
    supervisor._command(told)
    told_once = list(link.messages)
    assert told_once[-1].status.phase == job_pb2.WORKER_PHASE_READY
    supervisor._command(told)
    assert link.messages == told_once
