"""Helpers of the coordinator's tests: options, a readable journal, agents and what is sent to
them."""

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
    """Options of a job for which one worker is enough."""
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
    """The stream of an agent whose hello names two slots."""
    base = {"host": f"{node}.test", "slots": 2, "command": "train.py", "command_digest": "d"}
    return AgentStream(pb.AgentHello(node=node, start_token=token, **(base | hello)))


def arrived() -> ConnectedNode:
    """A node whose agent is connected."""
    nodes, stream = ConnectedAgents(), agent("n1", "0123")
    nodes.arrive(stream)
    (node,) = nodes
    return node


def sent(stream: AgentStream) -> list[pb.CoordinatorMessage]:
    """Messages sent since the last call; raises AssertionError if the stream was closed."""
    messages = _taken(stream)
    assert None not in messages, "the stream was closed"
    return [m for m in messages if m is not None]


def closed(stream: AgentStream) -> bool:
    """True if the stream was closed since the last call."""
    return None in _taken(stream)


def kinds(stream: AgentStream) -> list[str | None]:
    """Kinds of the messages sent since the last call; None: the stream was closed."""
    return [m.WhichOneof("kind") if m is not None else None for m in _taken(stream)]


def refused(stream: AgentStream) -> pb.Refused:
    """The refusal, which must be the last and only message of the stream."""
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
    return pb.AgentMessage(view=pb.NodeView(workers=[status_to_pb(w) for w in workers]))


def worker(name: str, phase: WorkerPhase, generation: int = 0, **fields: Any) -> WorkerStatus:
    """A worker with a slot; with a generation it has taken part in it and holds state."""
    base = {
        "slot": 0,
        "generation": generation,
        "acknowledged": generation,
        "has_state": generation > 0,
        "endpoint": f"{name}:1",
    }
    return WorkerStatus(worker=name, phase=phase, **(base | fields))


class Diary:
    """A journal whose entries a test can read."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.journal = Journal(self.entries.append)

    def names(self) -> list[str]:
        return [e.name for e in self.entries]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [dict(e.fields) for e in self.entries if e.name == name]
