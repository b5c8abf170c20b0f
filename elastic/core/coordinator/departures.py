"""When a node that leaves the job is no longer needed."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.core.coordinator.nodes import Nodes
from elastic.core.coordinator.view import has_heir, may_hold_state
from elastic.core.membership import Generation, NodeId, WorkerPhase, WorkerStatus

_IN_GROUP = (WorkerPhase.JOINING, WorkerPhase.TRAINING)


class Departures:
    """Tells of each leaving node once, and again when it is said again that it leaves."""

    def __init__(self) -> None:
        self._told: set[NodeId] = set()

    @property
    def told(self) -> frozenset[NodeId]:
        """Nodes that know by now, or soon, that they are not needed."""
        return frozenset(self._told)

    def forget(self, node: NodeId) -> None:
        """The node may not have been told."""
        self._told.discard(node)

    def completed(
        self, nodes: Nodes, current: Generation | None, before: Generation | None = None
    ) -> list[NodeId]:
        """Leaving nodes of which no worker is in the group, on its way out of the last one, or
        holds the state while there is no group to go on from it, or none that is known to have it.

        before: the group that `current`, not in place yet, is to follow.
        """
        if not nodes.leaving:
            self._told.clear()
            return []
        self._told &= nodes.leaving
        heirs = [s for n in nodes.staying for s in nodes.workers_of(n)]
        has_state = current is not None and _has_state(nodes, current)
        ready = [
            node
            for node in sorted(nodes.leaving - self._told)
            if not nodes.is_silent(node)
            and not any(
                _is_needed(s, current, heirs, has_state=has_state)
                or (before is not None and s.worker in before.worker_ids)
                for s in nodes.workers_of(node)
            )
        ]
        self._told.update(ready)
        return ready


def _has_state(nodes: Nodes, group: Generation) -> bool:
    """A member that is in contact has come to one state with the others: of those out of contact it
    is not certain that they still live, and one that has not joined yet may be a step behind, or
    stuck."""
    members = [w for name, w in nodes.workers().items() if name in group.worker_ids]
    return any(_has_joined(w.status, group) and w.silent_since is None for w in members)


def _has_joined(s: WorkerStatus, group: Generation) -> bool:
    trains = s.phase is WorkerPhase.TRAINING and s.generation == group.number
    return s.took_part and (trains or s.phase is WorkerPhase.FINISHED)


def _is_needed(
    s: WorkerStatus,
    current: Generation | None,
    heirs: Iterable[WorkerStatus],
    *,
    has_state: bool,
) -> bool:
    if current is None or not current.members:
        return may_hold_state(s, current) and not has_heir(s, heirs)
    if s.took_part and s.phase is WorkerPhase.READY and not (has_state or has_heir(s, heirs)):
        return True
    has_heard = s.phase is not WorkerPhase.READY or s.heard >= current.number
    return s.worker in current.worker_ids or s.phase in _IN_GROUP or not has_heard
