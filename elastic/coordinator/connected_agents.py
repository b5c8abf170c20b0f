"""Keeps the nodes whose agents are connected: admits them, and batches their views."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from elastic.coordinator.leadership import UNKNOWN_COMMAND, Command
from elastic.core.coordinator import events as ev
from elastic.core.membership import NodeId, WorkerStatus
from elastic.errors import ConfigurationError, ExitCode
from elastic.rpc.control import AgentStream
from elastic.rpc.identity import proves_start
from elastic.settings.limits import require_node_name
from elastic.store.job_runs import DEFAULT_RUN
from elastic.v1 import control_pb2 as pb
from elastic.version import __version__, release_of

_TOKEN_LENGTH = 8


@dataclass(slots=True)
class ConnectedNode:
    """What the coordinator knows of a node from its agent's stream."""

    stream: AgentStream
    node: NodeId
    """Its name, with a mark if several machines may have that name one after the other."""
    connected_unix_s: float = field(default_factory=time.time)
    statuses: tuple[WorkerStatus, ...] = ()
    longest_pause_s: float = 0.0
    """The longest pause of its agent's event loop, in seconds."""
    rounds: dict[str, int] = field(default_factory=dict)
    """By recorder (ledger, curve): the newest round of requests in which the node has sent all that
    was not stored, so that its reports leave no gap."""


def node_id(name: str, start_token: str) -> NodeId:
    """Return an id that differs from those of other nodes that had or will have this name."""
    return f"{name}@{start_token[:_TOKEN_LENGTH]}" if start_token else name


def name_of(node: NodeId) -> str:
    """Return the name by which people know the node."""
    return node.partition("@")[0]


class ConnectedAgents:
    """One agent for each node name: the newest, since the store gives a name to one at a time."""

    def __init__(
        self,
        isolation_timeout_s: float = 0.0,
        command: Command = UNKNOWN_COMMAND,
        may_train: Callable[[], bool] = lambda: False,
        out_of_contact: Callable[[], Iterable[NodeId]] = tuple,
        run_id: str = DEFAULT_RUN,
        saves: bool | None = None,
    ) -> None:
        """isolation_timeout_s: seconds after which an agent that is cut off must end its workers.
        command: the newest group's; binding while a group `may_train` or a node is `out_of_contact`
        whose workers may come back. saves: whether this coordinator completes checkpoints; None:
        agents need not agree."""
        self._saves = saves
        self._isolation_timeout_s = isolation_timeout_s
        self._command = command
        self._may_train, self._out_of_contact = may_train, out_of_contact
        self._run_id = run_id
        self._nodes: dict[str, ConnectedNode] = {}

    def __iter__(self) -> Iterator[ConnectedNode]:
        return iter(list(self._nodes.values()))

    def count(self) -> int:
        return len(self._nodes)

    def refusal(self, hello: pb.AgentHello, *, has_members: bool = False) -> pb.Refused | None:
        """Return why this agent cannot take part with the others, or not yet; None if it can.
        has_members: members of the group live on its node."""
        try:
            require_node_name(hello.node)
            if hello.machine:
                require_node_name(hello.machine, "machine")
        except ConfigurationError as error:
            return _refused(str(error))
        if not proves_start(hello.start_token, hello.start_secret):
            return _refused(
                f"the agent of node {hello.node!r} shows the start token of another agent, but not "
                "its secret, so it cannot take that one's place; remove the file start-token from "
                "its directory"
            )
        present = self._nodes.get(hello.node)
        if present is not None and not hello.start_token:
            return _refused(
                f"the node name {hello.node!r} is taken; choose another with --node-name"
            )
        if hello.version and release_of(hello.version) != release_of(__version__):
            return _refused(
                f"the agent of node {hello.node!r} has version {hello.version}, this coordinator "
                f"{__version__}; install the same release, {release_of(__version__)}"
            )
        if hello.isolation_timeout_s != self._isolation_timeout_s:
            return _refused(
                f"the agent of node {hello.node!r} has --isolation-timeout-s "
                f"{hello.isolation_timeout_s:g}, this coordinator {self._isolation_timeout_s:g}: "
                "a node that is cut off could still train when the others take it for ended; "
                "give both the same"
            )
        if (hello.run_id or DEFAULT_RUN) != self._run_id:
            return _refused(
                f"the agent of node {hello.node!r} belongs to run {hello.run_id!r}, but this "
                f"coordinator leads run {self._run_id!r}; give both the same --run-id"
            )
        if (mismatch := self.checkpoint_mismatch(hello)) and not self._may_train():
            return _refused(mismatch)
        for other in self._nodes.values():
            theirs = other.stream.hello
            if theirs.node != hello.node and theirs.command_digest != hello.command_digest:
                return _other_command(hello, f"node {theirs.node!r}", theirs.command)
        digest = self._command.digest
        if digest and digest != hello.command_digest:
            nodes = sorted({name_of(node) for node in self._out_of_contact()})
            if has_members:
                return _other_command(hello, "the workers that it found", self._command.text)
            if nodes or self._may_train():
                return _not_yet(hello, self._command.text, nodes)
        return None

    def checkpoint_mismatch(self, hello: pb.AgentHello) -> str:
        """Return why no checkpoint can be completed with this agent; empty if one can or none is
        wanted. It is no reason to end a group that trains."""
        unasked = self._saves is None or hello.classic or not hello.HasField("saves")
        if unasked or hello.saves == self._saves:
            return ""
        if hello.saves:
            return (
                f"the agent of node {hello.node!r} has --checkpoint-dir, but this coordinator does "
                "not, so it cannot complete checkpoints; give both the same directory"
            )
        return (
            f"the agent of node {hello.node!r} has no --checkpoint-dir, but this coordinator has "
            "one, so nothing would be saved in it; give both the same directory"
        )

    def note_command(self, names: Iterable[str]) -> Command:
        """Note and return the command of a group on these nodes, from one that is connected."""
        for name in names:
            if (node := self._nodes.get(name)) is not None:
                hello = node.stream.hello
                self._command = Command(text=hello.command, digest=hello.command_digest)
                break
        return self._command

    def arrive(self, stream: AgentStream) -> tuple[ConnectedNode | None, ConnectedNode]:
        """Let the agent in. Return the node that it replaces, if any, and its own node."""
        before = self._nodes.get(stream.node)
        node = node_id(stream.node, stream.hello.start_token)
        self._nodes[stream.node] = ConnectedNode(stream=stream, node=node)
        return before, self._nodes[stream.node]

    def leave(self, stream: AgentStream) -> ConnectedNode | None:
        """Remove the stream's node; None if the stream was not, or is no longer, the node's."""
        if self.by_stream(stream) is None:
            return None
        return self._nodes.pop(stream.node)

    def by_stream(self, stream: AgentStream) -> ConnectedNode | None:
        """Return the stream's node; None if the stream was not let in or has been replaced."""
        node = self._nodes.get(stream.node)
        return node if node is not None and node.stream is stream else None

    def find(self, node: NodeId) -> ConnectedNode | None:
        found = self._nodes.get(name_of(node))
        return found if found is not None and found.node == node else None

    def by_name(self, name: str) -> ConnectedNode | None:
        return self._nodes.get(name)

    def broadcast(self, **kind: Any) -> None:
        """Send `CoordinatorMessage(**kind)` to all agents."""
        message = pb.CoordinatorMessage(**kind).SerializeToString()
        for node in self._nodes.values():
            node.stream.send_serialized(message)


_AT_ONCE = 8  # with so few nodes, no view waits for another
_WAIT_S_PER_NODE = 1e-5


class ViewBatches:
    """Collects the views of many nodes for the machine, since each event costs a decision about all
    workers. A newer view of a node replaces one that still waits.

    The more nodes there are, the longer a view waits: 10 ms for a thousand.
    """

    def __init__(
        self, nodes: Callable[[], int], on_due: Callable[[ev.NodesReported], object]
    ) -> None:
        self._nodes, self._on_due = nodes, on_due
        self._waiting: dict[NodeId, ev.NodeReported] = {}
        self._timer: asyncio.TimerHandle | None = None

    def batch(self, report: ev.NodeReported) -> ev.NodesReported | None:
        """Return all views up to this one, to be handled now; None: this one waits."""
        self._waiting.pop(report.node, None)  # reinsert at the end: views are in order of arrival
        self._waiting[report.node] = report
        if self._nodes() <= _AT_ONCE:
            return self.take()[0]
        if self._timer is None:
            delay_s = self._nodes() * _WAIT_S_PER_NODE
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._due)
        return None

    def take(self) -> tuple[ev.NodesReported, ...]:
        """Return the views that wait, as one event; empty if none does."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return ()
        reports, self._waiting = tuple(self._waiting.values()), {}
        return (ev.NodesReported(reports=reports),)

    def _due(self) -> None:
        for batch in self.take():
            self._on_due(batch)


def _other_command(hello: pb.AgentHello, others: str, command: str) -> pb.Refused:
    return _refused(
        f"the agent of node {hello.node!r} runs a different command from {others}: "
        f"{hello.command!r}, not {command!r}; the nodes of a job must run the same script with "
        "the same arguments and checkpoint options (*** stands for values, which may be secrets: "
        "compare the agents' own command lines)"
    )


def _not_yet(hello: pb.AgentHello, command: str, nodes: Iterable[str]) -> pb.Refused:
    where = " and ".join(map(repr, nodes)) or "nodes out of contact"
    refused = _other_command(hello, "the job", command)
    refused.message += (
        f". Workers of the job may still run on {where}: this agent waits until they have "
        "certainly ended or have come back; to end the job for good, run `elastic stop`"
    )
    refused.for_now = True
    return refused


def _refused(message: str) -> pb.Refused:
    return pb.Refused(message=message, exit_code=ExitCode.REFUSED)
