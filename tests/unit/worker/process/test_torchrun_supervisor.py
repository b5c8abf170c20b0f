"""How the supervisor of a script written for torchrun handles the agent's messages."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.core.membership import FailureKind
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb
from elastic.worker.link import Link
from elastic.worker.process.torchrun import ClassicScript, _ScriptSupervisor


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
    """A process that waits for a signal, in a process group of its own.

    `terminate` reaches this process and not the process group of the tests.
    """

    def __init__(self) -> None:
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        super().__init__(pid, -1)
        self.pid = pid
        self.may_be_reaped = threading.Event()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        self.may_be_reaped.wait(30.0)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


TERMINATE = pb.WorkerCommand(terminate=pb.Terminate())


def failures(link: Sent) -> list[tuple[int, str]]:
    found = [m.failure for m in link.messages if m.WhichOneof("kind") == "failure"]
    return [(f.kind, f.message) for f in found]


@pytest.mark.parametrize("killed", ["before", "after", "never"])
def test_a_script_asked_to_end_is_reported_only_if_something_else_ended_it(
    tmp_path: Path, killed: str
) -> None:
    link, script = Sent(), Script()
    supervisor = _ScriptSupervisor(cast("Link", link), script, "train.py", tmp_path / "e")
    if killed == "before":
        os.kill(script.pid, signal.SIGKILL)
        os.waitid(os.P_PID, script.pid, os.WEXITED | os.WNOWAIT)
    if killed == "after":
        os.kill(script.pid, signal.SIGSTOP)  # so that SIGTERM does not end it
        os.waitid(os.P_PID, script.pid, os.WSTOPPED | os.WNOWAIT)
    supervisor._command(TERMINATE)
    if killed == "after":
        os.kill(script.pid, signal.SIGKILL)
    script.may_be_reaped.set()
    supervisor.run()
    told = [message for _, message in failures(link)]
    assert told == ([] if killed == "never" else ["was ended by SIGKILL (signal 9)"])


def test_an_exception_raised_before_the_script_was_asked_to_end_is_reported(tmp_path: Path) -> None:
    error_file = tmp_path / "e"
    link, script = Sent(), Script()
    supervisor = _ScriptSupervisor(cast("Link", link), script, "train.py", error_file)
    recorded = {"message": "ValueError: no such corpus", "errorCode": 1}
    error_file.write_text(json.dumps({"message": recorded}))
    supervisor._command(TERMINATE)  # while the interpreter shuts down
    script.may_be_reaped.set()
    supervisor.run()
    assert failures(link) == [(FailureKind.EXCEPTION.value, "ValueError: no such corpus")]


def test_a_repeated_assignment_of_a_slot_is_ignored(tmp_path: Path) -> None:
    link = Sent()
    supervisor = _ScriptSupervisor(
        cast("Link", link), ClassicScript(0, -1), "train.py", tmp_path / "e"
    )
    supervisor._machine.attached()
    told = pb.WorkerCommand(assignment=pb.Assignment(slot=1))
    supervisor._command(told)
    told_once = list(link.messages)
    assert told_once[-1].status.phase == job_pb2.WORKER_PHASE_READY
    supervisor._command(told)
    assert link.messages == told_once
