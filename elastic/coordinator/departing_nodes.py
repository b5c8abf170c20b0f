"""Nodes that are to leave: they want to, an operator wants it, or they fail too often."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from elastic.coordinator.attendance import Attendance, AttendingNode, name_of
from elastic.coordinator.exclusions import DRAINED, QUARANTINED, Exclusions
from elastic.core.coordinator import events as ev
from elastic.core.membership import Failure, NodeId
from elastic.core.quarantine import NodeFailures
from elastic.errors import ExitCode
from elastic.rpc.codec import status_to_pb
from elastic.runtime.journal import Journal
from elastic.settings.limits import require_node_name
from elastic.store.interface import GuardFailed
from elastic.store.retries import until_answered
from elastic.v1 import control_pb2 as pb


class DepartingNodes:
    """Tells the machine (`post`) and the nodes' agents; keeps in the store who is to stay away.

    start: runs a coroutine in the background.
    """

    def __init__(
        self,
        nodes: Attendance,
        exclusions: Exclusions,
        failures: NodeFailures,
        journal: Journal,
        *,
        post: Callable[[ev.Event], None],
        start: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._nodes = nodes
        self._exclusions = exclusions
        self._failures = failures
        self._journal = journal
        self._post = post
        self._start = start
        self._leaving: dict[NodeId, str] = {}  # reasons

    async def load(self) -> None:
        """Learn whom earlier coordinators wanted out; sits out outages."""
        await until_answered(self._exclusions.load, "load the excluded nodes")

    # ---- what happens to a node

    def arrived(self, node: AttendingNode) -> None:
        """Its agent has connected."""
        excluded = self._exclusions.get(node.stream.node)
        if excluded is not None:
            self._leave(node, excluded.reason)
            if excluded.state == DRAINED:
                node.stream.send(drain=pb.Drain())

    def wants_to_leave(self, node: AttendingNode, reason: str) -> None:
        """Its agent asks for it."""
        if node.node not in self._leaving:
            self._journal.record("node_leaving", node=node.stream.node, reason=reason)
        self._leave(node, reason)

    def worker_failed(self, node: AttendingNode, failure: Failure) -> None:
        """One of its workers has ended badly."""
        if self._failures.worker_failed(node.stream.node, failure, time.monotonic()):
            self._quarantine(node.stream.node)

    def members_lost(self, nodes: Iterable[NodeId]) -> None:
        """The group goes on without members on these nodes.

        An agent that is here has reported what failed. Several nodes lost at once have a cause in
        common, and none of them is to blame.
        """
        lost = [node for node in nodes if self._nodes.find(node) is None]
        if len(lost) == 1 and lost[0] not in self._leaving:
            name = name_of(lost[0])
            if self._failures.node_lost(name, time.monotonic()):
                self._quarantine(name)

    def left_group(self, node: AttendingNode) -> None:
        """No worker of it is in the group any more: it may go, or wait for being cleared."""
        name = node.stream.node
        self._journal.record("node_left_group", node=name)
        excluded = self._exclusions.get(name)
        if excluded is None:
            node.stream.send(drained=pb.Drained(reason=self._leaving.get(node.node, "")))
            return
        is_drained = excluded.state == DRAINED
        if is_drained or node.stream.hello.ends_in_quarantine:
            back = f"`elastic nodes --clear {name}` lets it come back"
            exit_code = ExitCode.DRAINED if is_drained else ExitCode.QUARANTINED
            node.stream.send(
                drained=pb.Drained(reason=f"{excluded.reason}; {back}", exit_code=exit_code)
            )

    def gone(self, node: NodeId) -> None:
        """Nothing of it runs any more."""
        self._leaving.pop(node, None)

    # ---- what operators want

    async def drain(self, name: str, reason: str) -> str:
        """Have a node left and kept out; say what follows.

        Raises TransientError, and ConfigurationError if no node can have the name.
        """
        require_node_name(name)
        await self._exclude(name, DRAINED, reason or "drained by an operator")
        node = self._nodes.named(name)
        if node is None:
            return f"no node {name} is connected now; it will be kept out when it comes"
        node.stream.send(drain=pb.Drain())
        return f"the workers of {name} leave at the next step boundary"

    async def clear(self, name: str) -> str:
        """Let a node take part again; say what follows. Raises TransientError."""
        cleared = await self._exclusions.clear(name)
        self._failures.forgive(name)
        if cleared is None:
            return f"{name} was neither drained nor in quarantine"
        self._journal.record("node_cleared", node=name, state=cleared.state)
        node = self._nodes.named(name)
        if node is not None:
            self._leaving.pop(node.node, None)
            node.stream.send(drain=pb.Drain(called_off=True))
            self._post(ev.NodeWelcomed(node=node.node))
        return f"{name} may take part again"

    # ---- for people

    def statuses(self) -> list[pb.NodeStatus]:
        """Of all that are connected or excluded, by name."""
        found = {node.stream.node: self._status(node) for node in self._nodes}
        for name in self._exclusions.names():
            excluded = self._exclusions.get(name)
            if excluded is not None and name not in found:
                found[name] = pb.NodeStatus(
                    node=name,
                    state=excluded.state,
                    reason=excluded.reason,
                    since_unix_s=excluded.since_unix_s,
                )
        return [found[name] for name in sorted(found)]

    def _status(self, node: AttendingNode) -> pb.NodeStatus:
        name = node.stream.node
        excluded = self._exclusions.get(name)
        leaving = self._leaving.get(node.node)
        state = excluded.state if excluded else "leaving" if leaving is not None else "ready"
        return pb.NodeStatus(
            node=name,
            host=node.stream.host,
            slots=node.stream.slots,
            version=node.stream.hello.version,
            workers=[status_to_pb(s) for s in node.statuses],
            state=state,
            reason=excluded.reason if excluded else leaving or "",
            since_unix_s=excluded.since_unix_s if excluded else node.connected_unix_s,
            failures=self._failures.failures(name, time.monotonic()),
            longest_pause_s=round(node.longest_pause_s, 3),
        )

    # ---- inside

    def _quarantine(self, name: str) -> None:
        others = [n for n in self._nodes if n.stream.node != name and n.node not in self._leaving]
        if not others or self._exclusions.get(name) is not None:
            return
        count = self._failures.failures(name, time.monotonic())
        reason = f"{count} failures within {self._failures.window_s:g} s"
        self._start(self._exclude(name, QUARANTINED, reason), "quarantine")

    async def _exclude(self, name: str, state: str, reason: str) -> None:
        self._journal.record(f"node_{state}", node=name, reason=reason)
        node = self._nodes.named(name)
        if node is not None:
            self._leave(node, reason)
        try:
            await self._exclusions.add(name, state, reason)
        except GuardFailed:
            return  # the next leader does not know it: the operator sees the node come back

    def _leave(self, node: AttendingNode, reason: str) -> None:
        self._leaving[node.node] = reason
        self._post(ev.NodeLeaving(node=node.node, reason=reason))
