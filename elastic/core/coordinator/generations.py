"""The generations that are not long past, and which of their groups may still train somewhere: no
other may be formed beside these (P1).

A group needs all of its members for every step. So it trains no more once one of them is known to
have gone on, ended or gone for good, whatever has become of the others. Until then the only group
that may follow it is one that takes a member of it along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from elastic.core.coordinator.decisions import Form
from elastic.core.coordinator.view import Sighting
from elastic.core.membership import (
    Failure,
    FailureKind,
    Generation,
    Member,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)

_REMEMBERED = 16


class PastGenerations:
    """Up to the newest, which is the last."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._failed = 0

    def remember(self, generation: Generation) -> None:
        """It exists, perhaps in another form than before."""
        self._generations[generation.number] = generation
        for number in list(self._generations)[:-_REMEMBERED]:
            del self._generations[number]

    def get(self, number: int) -> Generation | None:
        """One that is not long past."""
        return self._generations.get(number)

    def last_members(self) -> tuple[Member, ...]:
        """Those of the last group."""
        return next((g.members for g in reversed(self._generations.values()) if g.members), ())

    def spent(self) -> frozenset[WorkerId]:
        """The members of every one of them."""
        return frozenset(m.worker for g in self._generations.values() for m in g.members)

    def restart_count(self, decision: Form) -> int:
        """Of the generation that follows from this: every group but the first is a restart."""
        newest = max(self._generations, default=None)
        if newest is None:
            return 0
        return self._generations[newest].restart_count + bool(decision.members)

    def breaks_another(self, failure: Failure) -> bool:
        """Where all workers restart together: False for what follows from an earlier failure.

        The first failure in a group breaks it for the others, who may fail of that. Once the group
        is dissolved, for whatever reason, its members are being ended.
        """
        numbers = [n for n, g in self._generations.items() if failure.worker in g.worker_ids]
        if not numbers or failure.kind is FailureKind.LEFT_OUT:
            return True
        if numbers[-1] != max(self._generations) or numbers[-1] == self._failed:
            return False
        self._failed = numbers[-1]
        return True


@dataclass(frozen=True, slots=True)
class _Group:
    """A generation, and its workers as they are asked for at each report of each node."""

    generation: Generation
    workers: frozenset[WorkerId]
    of_node: Mapping[NodeId, frozenset[WorkerId]]


class Lineage:
    """The generations with members that are not known to have stopped."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    @property
    def may_train(self) -> tuple[Generation, ...]:
        """Oldest first. Kept with each new generation, for coordinators to come."""
        return tuple(g.generation for g in self._groups)

    def exists(self, generation: Generation) -> None:
        """A generation was written to the store: from now on it can be joined."""
        if generation.members:
            self._groups.append(_group(generation))

    def ended(self, workers: Collection[WorkerId]) -> None:
        """These processes are gone for certain."""
        self._keep(lambda g: g.workers.isdisjoint(workers))

    def reported(self, node: NodeId, workers: Collection[WorkerId]) -> None:
        """These are all the workers that run on the node."""
        self._keep(lambda g: g.of_node.get(node, frozenset()).issubset(workers))

    def node_gone(self, node: NodeId) -> None:
        """Nothing of this node runs any more."""
        self._keep(lambda g: node not in g.of_node)

    def seen(self, workers: Mapping[WorkerId, Sighting]) -> None:
        """What the workers in contact report of themselves now."""
        self._keep(lambda g: not _has_stopped(g, workers))

    def members(self) -> list[Member]:
        """Those of all these groups."""
        return [m for g in self._groups for m in g.generation.members]

    def allows(self, members: Collection[WorkerId]) -> bool:
        """May these form a group? None always may."""
        return not members or not any(g.workers.isdisjoint(members) for g in self._groups)

    def missing(
        self, members: Collection[WorkerId], workers: Mapping[WorkerId, Sighting]
    ) -> list[Sighting]:
        """Workers to take along so that `members` may form a group: a ready one of each group
        that may train. None if there is no such one of any of them."""
        found: list[Sighting] = []
        for group in self._groups:
            if group.workers.isdisjoint((*members, *(w.status.worker for w in found))):
                known = (workers[name] for name in sorted(group.workers & workers.keys()))
                ready = next((w for w in known if _can_be_taken(w)), None)
                if ready is None:
                    return []
                found.append(ready)
        return found

    def in_the_way(
        self, members: Collection[WorkerId], workers: Mapping[WorkerId, Sighting]
    ) -> frozenset[WorkerId]:
        """Who joins a group that keeps `members` from forming another, and holds nothing yet: where
        it does not get any further, nothing but its end makes room."""
        return frozenset(
            worker
            for g in self._groups
            if g.workers.isdisjoint(members)
            for worker in g.workers & workers.keys()
            if _joins_without_state(workers[worker], g.generation)
        )

    def _keep(self, may_train: Callable[[_Group], bool]) -> None:
        if self._groups:
            self._groups = [g for g in self._groups if may_train(g)]


def _group(generation: Generation) -> _Group:
    of_node: defaultdict[NodeId, set[WorkerId]] = defaultdict(set)
    for member in generation.members:
        of_node[member.node].add(member.worker)
    return _Group(
        generation,
        generation.worker_ids,
        {node: frozenset(workers) for node, workers in of_node.items()},
    )


def _has_stopped(group: _Group, workers: Mapping[WorkerId, Sighting]) -> bool:
    for name in group.workers:
        w = workers.get(name)
        if w is not None and w.silent_since is None and _is_past(w.status, group.generation):
            return True
    return False


def _can_be_taken(w: Sighting) -> bool:
    return w.status.phase is WorkerPhase.READY and w.silent_since is None and not w.leaving


def _joins_without_state(w: Sighting, generation: Generation) -> bool:
    s = w.status
    joins = s.phase is WorkerPhase.JOINING and s.generation == generation.number
    return joins and w.silent_since is None and not s.took_part


def _is_past(status: WorkerStatus, generation: Generation) -> bool:
    """It takes no further part in this generation's group."""
    if status.phase is WorkerPhase.FINISHED:  # in whichever group it was
        return True
    if status.generation < generation.number:  # it joins none but the newest it has heard of
        return status.heard > generation.number
    if status.generation > generation.number:
        return True
    return status.phase is WorkerPhase.READY
