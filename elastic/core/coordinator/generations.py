"""The generations that are not long past; which of their groups may still train somewhere: no other
may be formed beside these (P1); and which checkpoints of theirs are whole or can never be.

A group needs all of its members for every step. So it trains no more once one of them is known to
have gone on, ended or gone for good, whatever has become of the others. Until then the only group
that may follow it is one that takes a member of it along.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator.decisions import Form
from elastic.core.coordinator.view import ObservedWorker
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
    """The generations up to the newest, which is the last."""

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
        """The members of the last group."""
        return next((g.members for g in reversed(self._generations.values()) if g.members), ())

    def spent(self) -> frozenset[WorkerId]:
        """The members of every one of them."""
        return frozenset(m.worker for g in self._generations.values() for m in g.members)

    def restart_count(self, decision: Form) -> int:
        """The next generation's restart count: every group but the first is a restart."""
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

    def seen(self, workers: Mapping[WorkerId, ObservedWorker]) -> None:
        """What the workers in contact report of themselves now."""
        self._keep(lambda g: not _has_stopped(g, workers))

    def members(self) -> list[Member]:
        """The members of all these groups."""
        return [m for g in self._groups for m in g.generation.members]

    def allows(self, members: Collection[WorkerId]) -> bool:
        """May these form a group? No members at all always may."""
        return not members or not any(g.workers.isdisjoint(members) for g in self._groups)

    def missing(
        self, members: Collection[WorkerId], workers: Mapping[WorkerId, ObservedWorker]
    ) -> list[ObservedWorker]:
        """Workers to take along so that `members` may form a group: a ready one of each group
        that may train. None if there is no such one of any of them."""
        found: list[ObservedWorker] = []
        for group in self._groups:
            if group.workers.isdisjoint((*members, *(w.status.worker for w in found))):
                known = (workers[name] for name in sorted(group.workers & workers.keys()))
                ready = next((w for w in known if _can_be_taken(w)), None)
                if ready is None:
                    return []
                found.append(ready)
        return found

    def in_the_way(
        self, members: Collection[WorkerId], workers: Mapping[WorkerId, ObservedWorker]
    ) -> frozenset[WorkerId]:
        """Workers that join a group in the way of `members`, and hold no state: if such a worker
        gets no further, only its end makes room."""
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


def _has_stopped(group: _Group, workers: Mapping[WorkerId, ObservedWorker]) -> bool:
    for name in group.workers:
        w = workers.get(name)
        if w is not None and w.silent_since is None and _is_past(w.status, group.generation):
            return True
    return False


def _can_be_taken(w: ObservedWorker) -> bool:
    return w.status.phase is WorkerPhase.READY and w.silent_since is None and not w.leaving


def _joins_without_state(w: ObservedWorker, generation: Generation) -> bool:
    s = w.status
    joins = s.phase is WorkerPhase.JOINING and s.generation == generation.number
    return joins and w.silent_since is None and not s.has_state


def _is_past(status: WorkerStatus, generation: Generation) -> bool:
    """It takes no further part in this generation's group."""
    if status.phase is WorkerPhase.FINISHED:  # in whichever group it was
        return True
    if status.generation < generation.number:  # it joins none but the newest it has heard of
        return status.acknowledged > generation.number
    if status.generation > generation.number:
        return True
    return status.phase is WorkerPhase.READY


@dataclass(slots=True)
class _Save:
    """One checkpoint on its way; `writers` by shard index."""

    writers: tuple[WorkerId, ...]
    written: set[int] = field(default_factory=set)

    def waits_for(self, worker: WorkerId) -> bool:
        return any(w == worker and i not in self.written for i, w in enumerate(self.writers))


@dataclass(slots=True)
class CheckpointTracker:
    """Collects the members' reports; keyed by (step, generation), so a late report of an older
    generation can never complete the save of a newer one."""

    _saves: dict[tuple[int, int], _Save] = field(default_factory=dict)
    _whole: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    _given_up: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    _told: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    abandoned: bool = False
    """A save was given up since the last commit: another should follow soon."""
    newest: tuple[Generation, int] | None = None
    """The group that has saved the newest one that can be loaded, and its step; as far as known."""
    told: bool = True
    """Members are to hear of saves that wait for a lost member. While the job stops they would
    leave without a checkpoint: there the next group saves the same step, or the lost member comes
    back and completes this save."""

    def written(self, generation: Generation, step: int, index: int, count: int) -> bool:
        """Record a part; True when the checkpoint is now whole."""
        key = (step, generation.number)
        if count != generation.world_size or not 0 <= index < count:
            return False
        if key in self._given_up or key in self._whole:  # a member has missed what became of it
            return False
        save = self._saves.setdefault(key, _Save(tuple(m.worker for m in generation.members)))
        save.written.add(index)
        if len(save.written) < count:
            return False
        self._forget_up_to(step)
        self._whole.append(key)
        self.abandoned = False
        return True

    def committed(self, generation: Generation, step: int) -> None:
        """It can be loaded."""
        if self.newest is None or (self.newest[0].number, self.newest[1]) < (
            generation.number,
            step,
        ):
            self.newest = generation, step

    def is_beyond(self, holder: WorkerStatus) -> bool:
        """The newest checkpoint is of a group that has gone on without the worker, and of no
        earlier step than it holds."""
        if self.newest is None:
            return False
        generation, step = self.newest
        return 0 < holder.trained_in < generation.number and holder.committed <= step

    def is_given_up(self, step: int, generation: int) -> bool:
        """It was, and not long ago."""
        return (step, generation) in self._given_up

    def is_told(self, step: int, generation: int) -> bool:
        """It was given up, and members were told: they wait for it no longer."""
        return (step, generation) in self._told

    def lost(self, worker: WorkerId) -> list[tuple[int, int]]:
        """Give up the saves that wait for a worker that is gone; their (step, generation). Those
        that nobody is to hear of are kept."""
        waiting = [key for key, save in self._saves.items() if save.waits_for(worker)]
        self.abandoned = self.abandoned or bool(waiting)
        given_up = waiting if self.told else []
        for key in given_up:
            self._forget(key)
        return given_up

    def abandon(self, workers: Iterable[WorkerId]) -> list[fx.Effect]:
        """The same for several, as effects."""
        if not self._saves:
            return []
        lost = [(worker, key) for worker in sorted(workers) for key in self.lost(worker)]
        self._told.extend(key for _, key in lost)
        return [
            fx.AbandonCheckpoint(
                generation=generation,
                step=step,
                message=f"{worker} was lost while saving",
                reason="member_lost",
            )
            for worker, (step, generation) in lost
        ]

    def refused(self, step: int, generation: int) -> bool:
        """Storage refused a part: at once again would not help. False if that was known."""
        if (step, generation) in self._given_up:
            return False
        self._forget((step, generation))
        self._told.append((step, generation))
        return True

    def _forget(self, key: tuple[int, int]) -> None:
        self._saves.pop(key, None)
        self._given_up.append(key)

    def _forget_up_to(self, step: int) -> None:
        for key in [key for key in self._saves if key[0] <= step]:
            del self._saves[key]
