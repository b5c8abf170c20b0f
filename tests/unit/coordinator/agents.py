"""A coordinator's options, its journal, and agents as it sees them: streams whose other end writes
down what is sent."""

from __future__ import annotations

import asyncio
from typing import Any

from elastic.coordinator.connected_agents import ConnectedAgents, ConnectedNode
from elastic.coordinator.job_options import JobOptions
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.core.membership import WorkerPhase, WorkerStatus
from elastic.rpc.codec import status_to_pb
from elastic.rpc.control import AgentStream
from elastic.runtime.journal import Entry, Journal
from elastic.v1 import control_pb2 as pb


def options(*, max_workers: int = 2, **changes: Any) -> JobOptions:
    """Of a job that one worker can train."""
    base = {
        "job": "job",
        "formation": FormationPolicy(min_workers=1, max_workers=max_workers),
        "stall": StallPolicy(),
        "max_restarts": 3,
        "restart_window_s": 60.0,
        "stop_grace_s": 5.0,
    }
    return JobOptions(**(base | changes))


def agent(node: str, token: str = "", **hello: Any) -> AgentStream:
    """One that has said hello with two slots."""
    base = {"host": f"{node}.test", "slots": 2, "command": "train.py", "command_digest": "d"}
    return AgentStream(pb.AgentHello(node=node, start_token=token, **(base | hello)))


def arrived() -> ConnectedNode:
    """A node whose agent is connected."""
    nodes, stream = ConnectedAgents(), agent("n1", "0123")
    nodes.arrive(stream)
    (node,) = nodes
    return node


def sent(stream: AgentStream) -> list[pb.CoordinatorMessage]:
    """What was sent since the last look; raises AssertionError if the stream was closed."""
    messages = _taken(stream)
    assert None not in messages, "the stream was closed"
    return [m for m in messages if m is not None]


def closed(stream: AgentStream) -> bool:
    """It was closed since the last look."""
    return None in _taken(stream)


def kinds(stream: AgentStream) -> list[str | None]:
    """What kinds of messages were sent since the last look; None: the stream was closed."""
    return [m.WhichOneof("kind") if m is not None else None for m in _taken(stream)]


def refused(stream: AgentStream) -> pb.Refused:
    """Why its stream was closed, and nothing else was said on it."""
    (message, end) = _taken(stream)
    assert message is not None
    assert message.HasField("refused")
    assert end is None
    return message.refused


def _taken(stream: AgentStream) -> list[pb.CoordinatorMessage | None]:
    queue: asyncio.Queue[pb.CoordinatorMessage | bytes | None] = stream._outgoing
    taken = [queue.get_nowait() for _ in range(queue.qsize())]
    return [pb.CoordinatorMessage.FromString(m) if isinstance(m, bytes) else m for m in taken]


def view(*workers: WorkerStatus) -> pb.AgentMessage:
    """A node's whole view."""
    return pb.AgentMessage(view=pb.NodeView(workers=[status_to_pb(w) for w in workers]))


def worker(name: str, phase: WorkerPhase, generation: int = 0, **fields: Any) -> WorkerStatus:
    """A worker with a slot; it has taken part if it is in a generation."""
    base = {
        "slot": 0,
        "generation": generation,
        "acknowledged": generation,
        "has_state": generation > 0,
        "endpoint": f"{name}:1",
    }
    return WorkerStatus(worker=name, phase=phase, **(base | fields))


class Diary:
    """A journal whose entries can be asked for."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.journal = Journal(self.entries.append)

    def names(self) -> list[str]:
        return [e.name for e in self.entries]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [dict(e.fields) for e in self.entries if e.name == name]
