"""The recent generations: which of their groups may still train, and which of their checkpoints are
complete.

No other group may be formed beside one that may still train (P1). A group needs all of its members
for every step. So it can train no more once one of them is known to have moved to another group,
ended or gone for good, whatever the others do. Until then the next group must include one of its
members.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator.decisions import Form
from elastic.core.coordinator.view import ObservedWorker
from elastic.core.forks import Fork, counts, with_fork
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
    """The newest generations, oldest first, in their newest form."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._failed = 0

    def remember(self, generation: Generation) -> None:
        self._generations[generation.number] = generation
        for number in list(self._generations)[:-_REMEMBERED]:
            del self._generations[number]

    def get(self, number: int) -> Generation | None:
        return self._generations.get(number)

    def last_members(self) -> tuple[Member, ...]:
        return next((g.members for g in reversed(self._generations.values()) if g.members), ())

    def past_members(self) -> frozenset[WorkerId]:
        return frozenset(m.worker for g in self._generations.values() for m in g.members)

    def restart_count(self, decision: Form) -> int:
        """The restart count of the next generation: every group except the first is a restart."""
        newest = max(self._generations, default=None)
        if newest is None:
            return 0
        return self._generations[newest].restart_count + bool(decision.members)

    def is_unexplained_failure(self, failure: Failure) -> bool:
        """Record a failure where all workers restart together; False if an earlier one explains it.

        The first failure in a group breaks it for the others, which may fail because of that. Once
        the group is dissolved, for whatever reason, its members are being ended.
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
    """A generation, with its workers indexed for the checks at each report of each node."""

    generation: Generation
    workers: frozenset[WorkerId]
    of_node: Mapping[NodeId, frozenset[WorkerId]]


class Lineage:
    """The groups that may still train: none of their members is known to have stopped."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    @property
    def may_train(self) -> tuple[Generation, ...]:
        """Oldest first. Stored with each new generation, for later coordinators."""
        return tuple(g.generation for g in self._groups)

    def exists(self, generation: Generation) -> None:
        """The generation was written to the store: workers can join it from now on."""
        if generation.members:
            self._groups.append(_group(generation))

    def ended(self, workers: Collection[WorkerId]) -> None:
        self._keep(lambda g: g.workers.isdisjoint(workers))

    def reported(self, node: NodeId, workers: Collection[WorkerId]) -> None:
        """The node runs these workers and no others."""
        self._keep(lambda g: g.of_node.get(node, frozenset()).issubset(workers))

    def node_gone(self, node: NodeId) -> None:
        self._keep(lambda g: node not in g.of_node)

    def seen(self, workers: Mapping[WorkerId, ObservedWorker]) -> None:
        """Drop the groups that a worker in contact has left."""
        self._keep(lambda g: not _has_stopped(g, workers))

    def members(self) -> list[Member]:
        return [m for g in self._groups for m in g.generation.members]

    def allows(self, members: Collection[WorkerId]) -> bool:
        """True if these may form a group. A generation without members is always allowed."""
        return not members or not any(g.workers.isdisjoint(members) for g in self._groups)

    def missing(
        self, members: Collection[WorkerId], workers: Mapping[WorkerId, ObservedWorker]
    ) -> list[ObservedWorker]:
        """The workers to add so that `members` may form a group: a ready one of each group that may
        train and has none among them. Empty if one of these groups has no ready worker."""
        found: list[ObservedWorker] = []
        for group in self._groups:
            if group.workers.isdisjoint((*members, *(w.status.worker for w in found))):
                known = (workers[name] for name in sorted(group.workers & workers.keys()))
                ready = next((w for w in known if _can_be_taken(w)), None)
                if ready is None:
                    return []
                found.append(ready)
        return found

    def blocking_joiners(
        self, members: Collection[WorkerId], workers: Mapping[WorkerId, ObservedWorker]
    ) -> frozenset[WorkerId]:
        """Workers without state that are joining a group which forbids a group of `members`. If
        such a worker does not get any further, `members` can form a group only after its end."""
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
        if (
            w is not None
            and w.out_of_contact_since is None
            and _is_past(w.status, group.generation)
        ):
            return True
    return False


def _can_be_taken(w: ObservedWorker) -> bool:
    return (
        w.status.phase is WorkerPhase.READY
        and w.out_of_contact_since is None
        and not w.on_leaving_node
    )


def _joins_without_state(w: ObservedWorker, generation: Generation) -> bool:
    s = w.status
    joins = s.phase is WorkerPhase.JOINING and s.generation == generation.number
    return joins and w.out_of_contact_since is None and not s.has_state


def _is_past(status: WorkerStatus, generation: Generation) -> bool:
    """True if the worker takes no further part in this generation's group."""
    if status.phase is WorkerPhase.FINISHED:  # in any group
        return True
    if status.generation < generation.number:  # it joins only the newest that it has acknowledged
        return status.acknowledged > generation.number
    if status.generation > generation.number:
        return True
    return status.phase is WorkerPhase.READY


@dataclass(slots=True)
class _Save:
    """A checkpoint that is being written. `writers` are in the order of shard indices."""

    writers: tuple[WorkerId, ...]
    written: set[int] = field(default_factory=set)

    def waits_for(self, worker: WorkerId) -> bool:
        return any(w == worker and i not in self.written for i, w in enumerate(self.writers))


@dataclass(slots=True)
class CheckpointTracker:
    """Collects which parts of each checkpoint are written, and gives up saves that lost a writer.

    Saves are keyed by (step, generation), so that a late report of an older generation can never
    complete the save of a newer one.
    """

    _saves: dict[tuple[int, int], _Save] = field(default_factory=dict)
    _whole: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    _given_up: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    _known_given_up: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    abandoned: bool = False
    """A save lost a writer since the last complete one: another save should follow soon."""
    newest: tuple[Generation, int] | None = None
    """The newest checkpoint that can be loaded, as far as known: the group that saved it, and its
    step."""
    gives_up_on_loss: bool = True
    """Whether a save that waits for a lost member is given up, and the others are told to go on.
    False while the job stops, since they would leave without a checkpoint: the lost member may come
    back and complete the save, and otherwise the next group saves the same step."""
    _forks: tuple[Fork, ...] = ()

    def began(self, generation: int, step: int) -> list[fx.Effect]:
        """A group has gone on from `step`: give up what earlier ones save beyond it."""
        self._forks = with_fork(self._forks, Fork("", generation, step))
        if self.newest is not None and self.is_superseded(self.newest[0].number, self.newest[1]):
            self.newest = None
        void = [key for key in self._saves if self.is_superseded(key[1], key[0])]
        for key in void:
            self._forget(key)
        self._known_given_up.extend(void)
        return [superseded(at, saved_in) for at, saved_in in void]

    def is_superseded(self, generation: int, step: int) -> bool:
        """True if a later group has gone on from an earlier step."""
        return not counts(self._forks, "", generation, step)

    def written(self, generation: Generation, step: int, index: int, count: int) -> bool:
        """Record a written part; True if it completes the checkpoint."""
        key = (step, generation.number)
        if count != generation.world_size or not 0 <= index < count:
            return False
        if key in self._given_up or key in self._whole:  # this member has missed the outcome
            return False
        save = self._saves.setdefault(key, _Save(tuple(m.worker for m in generation.members)))
        save.written.add(index)
        if len(save.written) < count:
            return False
        self._forget_up_to(step, generation.number)
        self._whole.append(key)
        self.abandoned = False
        return True

    def committed(self, generation: Generation, step: int) -> None:
        if self.newest is None or (self.newest[0].number, self.newest[1]) < (
            generation.number,
            step,
        ):
            self.newest = generation, step

    def is_beyond(self, holder: WorkerStatus) -> bool:
        """True if a group that went on without the worker has saved the newest checkpoint, of the
        step that the worker holds or a later one."""
        if self.newest is None:
            return False
        generation, step = self.newest
        return 0 < holder.trained_in < generation.number and holder.committed <= step

    def is_given_up(self, step: int, generation: int) -> bool:
        return (step, generation) in self._given_up

    def is_known_given_up(self, step: int, generation: int) -> bool:
        """True if members know that the save was given up: they no longer wait for it."""
        return (step, generation) in self._known_given_up

    def lost(self, worker: WorkerId) -> list[tuple[int, int]]:
        """Give up the saves that wait for a part of a lost worker; return their (step, generation).
        While `gives_up_on_loss` is False they are kept, and the result is empty."""
        waiting = [key for key, save in self._saves.items() if save.waits_for(worker)]
        self.abandoned = self.abandoned or bool(waiting)
        given_up = waiting if self.gives_up_on_loss else []
        for key in given_up:
            self._forget(key)
        return given_up

    def abandon(self, workers: Iterable[WorkerId]) -> list[fx.Effect]:
        """Give up the saves that wait for any of these lost workers; return the effects."""
        if not self._saves:
            return []
        lost = [(worker, key) for worker in sorted(workers) for key in self.lost(worker)]
        self._known_given_up.extend(key for _, key in lost)
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
        """Give up a save because storage has refused a part: to save again at once would not help.
        False if the save was given up before."""
        if (step, generation) in self._given_up:
            return False
        self._forget((step, generation))
        self._known_given_up.append((step, generation))
        return True

    def _forget(self, key: tuple[int, int]) -> None:
        self._saves.pop(key, None)
        self._given_up.append(key)

    def _forget_up_to(self, step: int, generation: int) -> None:
        """A later group may have gone back: its saves of fewer steps are still wanted."""
        for key in [key for key in self._saves if key[0] <= step and key[1] <= generation]:
            del self._saves[key]


def superseded(step: int, generation: int) -> fx.AbandonCheckpoint:
    return fx.AbandonCheckpoint(
        generation=generation,
        step=step,
        message="a later group has gone on from an earlier step",
        reason="superseded",
    )
