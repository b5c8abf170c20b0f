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
        self.notices: list[tuple[str, str]] = []

    def send(self, **kind: Any) -> None:
        self.messages.append(pb.WorkerMessage(**kind))

    def notice(self, name: str, fields: dict[str, str]) -> None:
        self.notices.append((name, fields["message"]))

    def hello(self) -> None:
        pass

    def start(self, *_: object) -> None:
        pass


class Script(ClassicScript):
    """A shell script, by default one that only waits, in a process group of its own."""

    def __init__(self, text: str = "read line; exit 3") -> None:
        command = [*DIE_WITH_PARENT, "sh", "-c", text]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid
        super().__init__(self.pid, -1)

    def fail(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def heard(self) -> str:
        """The next line that the script writes."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def wait(self) -> int:
        return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


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


TERMINATE = pb.WorkerCommand(terminate=pb.Terminate(group_after_s=600.0))


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


GROUP = """
sh -c 'trap "echo loader; exit" TERM; echo ready; while :; do sleep 0.02; done' &
trap "echo script; CODE" TERM
echo ready
while :; do sleep 0.02; done
"""


def supervised(text: str, link: Sent, tmp_path: Path) -> tuple[_ScriptSupervisor, Script]:
    script = Script(text)
    assert [script.heard(), script.heard()] == ["ready", "ready"]
    error_file = tmp_path / "error.json"
    return _ScriptSupervisor(cast("Link", link), script, "train.py", error_file), script


@pytest.mark.parametrize(
    ("group_after_s", "heard"), [(600.0, ["script"]), (0.1, ["script", "loader"])]
)
def test_the_rest_of_the_group_is_asked_to_end_after_the_script(
    link: Sent, tmp_path: Path, group_after_s: float, heard: list[str]
) -> None:
    supervisor, script = supervised(GROUP.replace("CODE", ":"), link, tmp_path)
    terminate = pb.Terminate(group_after_s=group_after_s)
    supervisor._command(pb.WorkerCommand(terminate=terminate))
    try:
        first = [script.heard()]
        if group_after_s == 600.0:
            os.kill(script.pid, signal.SIGUSR1)  # ends the script, and nothing else
            os.waitid(os.P_PID, script.pid, os.WEXITED | os.WNOWAIT)
        else:
            first += sorted([script.heard(), script.heard()])[:1]
        assert first == heard
    finally:
        os.killpg(script.pid, signal.SIGKILL)
        script.close()


@pytest.mark.parametrize(("code", "told"), [(0, 0), (143, 0), (3, 1)])
def test_a_script_that_fails_as_it_ends_on_request_is_told(
    link: Sent, tmp_path: Path, code: int, told: int
) -> None:
    supervisor, script = supervised(GROUP.replace("CODE", f"exit {code}"), link, tmp_path)
    supervisor._command(TERMINATE)
    assert supervisor.run() == 0
    os.killpg(script.pid, signal.SIGKILL)
    script.close()
    assert not failures(link)
    assert [name for name, _ in link.notices] == ["failed_at_end"] * told
    assert all(str(code) in message for _, message in link.notices)
