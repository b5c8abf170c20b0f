"""When a node that is to take no part any more is no longer needed."""

from __future__ import annotations

from elastic.core.coordinator.nodes import Nodes
from elastic.core.membership import Generation, NodeId, WorkerPhase

_IN_GROUP = (WorkerPhase.JOINING, WorkerPhase.TRAINING)


class Departures:
    """Tells of each leaving node once, and again when it is said again that it leaves."""

    def __init__(self) -> None:
        self._told: set[NodeId] = set()

    def forget(self, node: NodeId) -> None:
        """The node may not have been told."""
        self._told.discard(node)

    def completed(self, nodes: Nodes, current: Generation | None) -> list[NodeId]:
        """Leaving nodes of which no worker is in the group, or on its way out of the last one."""
        self._told &= nodes.leaving
        members = current.worker_ids if current is not None else frozenset()
        ready = [
            node
            for node in sorted(nodes.leaving - self._told)
            if not nodes.is_silent(node)
            and not any(s.worker in members or s.phase in _IN_GROUP for s in nodes.workers_of(node))
        ]
        self._told.update(ready)
        return ready
