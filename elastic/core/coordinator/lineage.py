"""Which groups may still train somewhere: no other may be formed beside them (P1).

A group needs all of its members for every step. So it trains no more once one of them is known to
have gone on, ended or gone for good, whatever has become of the others. Until then the only group
that may follow it is one that takes a member of it along.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.core.coordinator.view import Sighting
from elastic.core.membership import Generation, Member, NodeId, WorkerId, WorkerPhase, WorkerStatus


class Lineage:
    """The generations with members that are not known to have stopped."""

    def __init__(self) -> None:
        self._may_train: list[Generation] = []

    @property
    def may_train(self) -> tuple[Generation, ...]:
        """Oldest first. Kept with each new generation, for coordinators to come."""
        return tuple(self._may_train)

    def exists(self, generation: Generation) -> None:
        """A generation was written to the store: from now on it can be joined."""
        if generation.members:
            self._may_train.append(generation)

    def ended(self, workers: Collection[WorkerId]) -> None:
        """These processes are gone for certain."""
        self._may_train = [g for g in self._may_train if not g.worker_ids.intersection(workers)]

    def reported(self, node: NodeId, workers: Collection[WorkerId]) -> None:
        """These are all the workers that run on the node."""
        self.ended([m.worker for m in self.members() if m.node == node and m.worker not in workers])

    def node_gone(self, node: NodeId) -> None:
        """Nothing of this node runs any more."""
        self._may_train = [g for g in self._may_train if not any(m.node == node for m in g.members)]

    def seen(self, workers: Mapping[WorkerId, Sighting]) -> None:
        """What the workers in contact report of themselves now."""
        self._may_train = [
            g
            for g in self._may_train
            if not any(
                m.worker in workers
                and workers[m.worker].silent_since is None
                and _is_past(workers[m.worker].status, g)
                for m in g.members
            )
        ]

    def members(self) -> list[Member]:
        """Those of all these groups."""
        return [m for g in self._may_train for m in g.members]

    def allows(self, members: Collection[WorkerId]) -> bool:
        """May these form a group? None always may."""
        return not members or all(g.worker_ids.intersection(members) for g in self._may_train)


def _is_past(status: WorkerStatus, generation: Generation) -> bool:
    """It takes no further part in this generation's group."""
    if status.generation != generation.number:
        return status.generation > generation.number
    return status.phase in (WorkerPhase.READY, WorkerPhase.FINISHED)
