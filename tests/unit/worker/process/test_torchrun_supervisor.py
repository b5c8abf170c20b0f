"""How the supervisor of a script written for torchrun handles the agent's messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

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
