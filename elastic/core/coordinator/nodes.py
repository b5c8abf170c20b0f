"""What the coordinator knows of nodes and their workers: their reports, losses and replacements.

It also decides when a leaving node is no longer needed, and whether newcomers may join the group
after others like them have failed in it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.coordinator.view import ObservedWorker, has_successor, may_hold_state
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
from elastic.core.restarts import Backoff

_OUTAGE_S = 2.0  # an outage of all nodes is noticed for each of them within this


@dataclass(slots=True)
class _Node:
    slots: int = 0
    workers: dict[WorkerId, WorkerStatus] = field(default_factory=dict)
    failed: set[WorkerId] = field(default_factory=set)
    """Failed workers that the node's view still has. A name may come back after a restart."""
    out_of_contact_since: float | None = None
    expected: bool = False
    restarting: bool = False
    in_contact_since: float = -math.inf
    left_behind: bool = False
    seen: dict[WorkerId, ObservedWorker] | None = None
    """Cache of `observed`; None after a change."""

    def observed(self, name: NodeId, *, on_leaving_node: bool) -> dict[WorkerId, ObservedWorker]:
        if self.seen is None:
            self.seen = {
                worker: ObservedWorker(
                    node=name,
                    status=status,
                    out_of_contact_since=self.out_of_contact_since,
                    expected=self.expected,
                    restarting=self.restarting,
                    in_contact_since=self.in_contact_since,
                    left_behind=self.left_behind,
                    on_leaving_node=on_leaving_node,
                )
                for worker, status in self.workers.items()
            }
        return self.seen


class Nodes:
    """The nodes that have reported or are expected. Methods in the past tense take what has become
    known; those that can lose workers return them."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Node] = {}
        self._leaving: frozenset[NodeId] = frozenset()
        self._seen: Mapping[WorkerId, ObservedWorker] | None = None  # cache, None after a change
        self._slots: int | None = None  # cache, None after a change

    @property
    def slots(self) -> int:
        """The slots of all nodes that are not leaving."""
        if self._slots is None:
            taking_part = self._nodes.keys() - self._leaving
            self._slots = sum(self._nodes[name].slots for name in taking_part)
        return self._slots

    @property
    def leaving(self) -> frozenset[NodeId]:
        return self._leaving

    @property
    def staying(self) -> list[NodeId]:
        """The nodes in contact that are not leaving."""
        contact = [n for n, v in self._nodes.items() if v.out_of_contact_since is None]
        return [n for n in contact if n not in self._leaving]

    def all_leave(self) -> bool:
        """True if all known nodes leave, not counting those left behind. False without any."""
        there = [name for name, node in self._nodes.items() if not node.left_behind]
        return bool(there) and self._leaving.issuperset(there)

    def workers(self) -> Mapping[WorkerId, ObservedWorker]:
        if self._seen is None:
            seen: dict[WorkerId, ObservedWorker] = {}
            for name, node in self._nodes.items():
                seen.update(node.observed(name, on_leaving_node=name in self._leaving))
            self._seen = seen
        return self._seen

    def workers_of(self, name: NodeId) -> tuple[WorkerStatus, ...]:
        node = self._nodes.get(name)
        return tuple(node.workers.values()) if node is not None else ()

    def home_of(self, worker: WorkerId) -> NodeId:
        """The node of a known worker. Raises StopIteration for an unknown one."""
        return next(n for n, view in self._nodes.items() if worker in view.workers)

    def is_needed(
        self,
        name: NodeId,
        groups: Iterable[Generation | None],
        trained: Iterable[Member] = (),
    ) -> bool:
        """True if a worker of the node is a member of one of these groups. If none of them has
        members: True if a worker of the node holds the state, or was in the group that trained last
        (`trained`) and may have received the state since its last report."""
        existing = [g for g in groups if g is not None]
        if any(m.node == name for g in existing for m in g.members):
            return True
        dissolved = not any(g.members for g in existing)
        if dissolved and self._may_have_trained(name, trained, existing):
            return True
        return dissolved and any(s.has_state for s in self.workers_of(name))

    def out_of_contact(self) -> list[NodeId]:
        return [n for n, v in self._nodes.items() if v.out_of_contact_since is not None]

    def is_out_of_contact(self, name: NodeId) -> bool:
        """True also for an unknown node."""
        node = self._nodes.get(name)
        return node is None or node.out_of_contact_since is not None

    # ---- events

    def presumed(self, generation: Generation, phase: WorkerPhase, now: float) -> None:
        """Assume that the members of `generation` are alive in `phase` until their nodes report. A
        new coordinator calls this."""
        known = self.workers()
        trains = phase is WorkerPhase.TRAINING
        for member in generation.members:
            if member.worker in known:
                continue
            node = self._nodes.setdefault(
                member.node, _Node(out_of_contact_since=now, expected=True)
            )
            node.slots += 1
            node.workers[member.worker] = WorkerStatus(
                worker=member.worker,
                phase=phase,
                slot=member.slot,
                generation=generation.number if trains else 0,
                acknowledged=generation.number if trains else 0,
                endpoint=member.endpoint,
                has_state=trains,
            )
            self._changed(member.node)

    def presumed_left_behind(self, generation: Generation, now: float) -> None:
        """Like `presumed`, for an earlier generation that may train and nodes that are not known
        from newer ones. Their workers may hold the state, and may not be alive."""
        strangers = [m for m in generation.members if m.node not in self._nodes]
        for member in strangers:
            node = self._nodes.setdefault(
                member.node, _Node(out_of_contact_since=now, expected=True, left_behind=True)
            )
            node.workers[member.worker] = WorkerStatus(
                worker=member.worker,
                phase=WorkerPhase.TRAINING,
                slot=member.slot,
                generation=generation.number,
                acknowledged=generation.number,
                endpoint=member.endpoint,
                has_state=True,
            )
            self._changed(member.node)

    def reported(
        self,
        name: NodeId,
        slots: int,
        workers: Iterable[WorkerStatus],
        now: float = 0.0,
        *,
        restarting: bool = False,
    ) -> frozenset[WorkerId]:
        """Replace the previous view of the node; return the workers that it no longer has."""
        node = self._nodes.setdefault(name, _Node(out_of_contact_since=now, left_behind=True))
        self._changed(name)
        # A node that was forgotten when it lost contact comes back here, too.
        if node.out_of_contact_since is not None:
            self._came_back(now)
            node.in_contact_since = now
        seen = {s.worker: s for s in workers}
        before = frozenset(node.workers)
        node.slots, node.out_of_contact_since = slots, None
        node.restarting = restarting
        node.expected = node.left_behind = False
        node.failed.intersection_update(seen)
        for worker in node.failed:
            del seen[worker]
        node.workers = seen
        return before.difference(node.workers)

    def reconnected(self, name: NodeId, now: float) -> None:
        """Another stream of the node has replaced one whose end was not noticed: only from now on
        does the node learn what was decided meanwhile."""
        node = self._nodes.get(name)
        if node is not None and node.out_of_contact_since is None:
            node.in_contact_since = now
            self._changed(name)

    def lost_contact(self, name: NodeId, now: float) -> None:
        """The node's stream has ended; its workers may still train."""
        self._changed(name)
        node = self._nodes.get(name)
        if node is not None:
            node.out_of_contact_since = now

    def lost(self, name: NodeId) -> frozenset[WorkerId]:
        self._changed(name)
        return frozenset(self._nodes.pop(name, _Node()).workers)

    def unneeded_lost_contact(self, name: NodeId, now: float) -> frozenset[WorkerId]:
        """A node that the group does not need has lost contact. Treat it as left behind if it has
        a holder of the state, because only its agent may be gone; otherwise forget it."""
        holds = any(
            s.has_state and s.phase is not WorkerPhase.FINISHED for s in self.workers_of(name)
        )
        if not holds:
            return self.lost(name)
        self.lost_contact(name, now)
        return self._leave_behind(name, None)

    def leave_behind_out_of_contact(self, before: Generation | None = None) -> frozenset[WorkerId]:
        """A group goes on without the nodes out of contact; return their workers. Remember nodes
        that hold the state, or may have received it in the group `before`: if all members that go
        on are lost, these nodes have the only copy."""
        return frozenset(
            worker for name in self.out_of_contact() for worker in self._leave_behind(name, before)
        )

    def arrived(self, generation: Generation) -> None:
        """A planned change took effect: treat the nodes without members as left behind if they have
        not reported to this coordinator yet. They may be out of contact, or have ended before the
        election, in which case no event will say so."""
        for name in self.out_of_contact():
            if self._nodes[name].expected and not generation.worker_ids.intersection(
                self._nodes[name].workers
            ):
                self._leave_behind(name, None)

    def failed(self, name: NodeId, worker: WorkerId) -> frozenset[WorkerId]:
        """A worker has ended, although the node's next view may still have it."""
        self._changed(name)
        node = self._nodes.get(name)
        if node is None:
            return frozenset()
        node.failed.add(worker)
        return frozenset((worker,)) if node.workers.pop(worker, None) else frozenset()

    def left(self, name: NodeId) -> None:
        self._changed(name)
        self._leaving |= {name}

    def welcomed(self, name: NodeId) -> None:
        self._changed(name)
        self._leaving -= {name}

    # ---- internals

    def _may_have_trained(
        self, name: NodeId, trained: Iterable[Member], groups: Iterable[Generation]
    ) -> bool:
        """True if one of the node's workers is in `trained` and may hold the state, because it has
        not acknowledged the newest of `groups` yet."""
        newest = max(groups, key=lambda g: g.number, default=None)
        names = {m.worker for m in trained if m.node == name}
        here = [s for s in self.workers_of(name) if s.worker in names]
        return any(may_hold_state(s, newest) for s in here)

    def _came_back(self, now: float) -> None:
        """Restart the time in which the other nodes may come back, if the coordinator was cut off:
        all nodes lost contact at about the same time, and this is the first one that is back."""
        since = [n.out_of_contact_since for n in self._nodes.values() if not n.left_behind]
        fell = [at for at in since if at is not None]
        if len(fell) < len(since) or max(fell, default=0.0) > min(fell, default=0.0) + _OUTAGE_S:
            return
        for name, node in self._nodes.items():
            if not (node.expected or node.left_behind):
                node.out_of_contact_since = now  # the caller resets it for the node that came back
                self._changed(name)

    def _leave_behind(self, name: NodeId, before: Generation | None) -> frozenset[WorkerId]:
        node = self._nodes[name]
        if node.left_behind:
            return frozenset()
        holders = {
            worker: s
            for worker, s in node.workers.items()
            if s.has_state or may_hold_state(s, before)
        }
        if not holders:
            return self.lost(name)
        workers, node.workers = frozenset(node.workers), holders
        node.slots, node.left_behind = 0, True
        self._changed(name)
        return workers

    def _changed(self, name: NodeId) -> None:
        self._seen = self._slots = None
        if name in self._nodes:
            self._nodes[name].seen = None


_IN_GROUP = (WorkerPhase.JOINING, WorkerPhase.TRAINING)


class Departures:
    """Finds the leaving nodes that are no longer needed, each once; again after `forget`."""

    def __init__(self) -> None:
        self._released: set[NodeId] = set()

    @property
    def released(self) -> frozenset[NodeId]:
        return frozenset(self._released)

    def forget(self, node: NodeId) -> None:
        self._released.discard(node)

    def completed(
        self, nodes: Nodes, current: Generation | None, previous: Generation | None = None
    ) -> list[NodeId]:
        """The leaving nodes in contact that are no longer needed, and were not released before.

        A node is needed while a worker of it is in the group or comes out of the last one, or holds
        state that neither the group nor a staying worker is known to have.
        previous: the group that trains until `current` is in place.
        """
        if not nodes.leaving:
            self._released.clear()
            return []
        self._released &= nodes.leaving
        successors = [s for n in nodes.staying for s in nodes.workers_of(n)]
        group_has_it = current is not None and _group_has_state(nodes, current)
        ready = [
            node
            for node in sorted(nodes.leaving - self._released)
            if not nodes.is_out_of_contact(node)
            and not any(
                _is_needed(s, current, successors, group_has_it=group_has_it)
                or (previous is not None and s.worker in previous.worker_ids)
                for s in nodes.workers_of(node)
            )
        ]
        self._released.update(ready)
        return ready


def _group_has_state(nodes: Nodes, group: Generation) -> bool:
    """True if a member in contact has come to one state with the others. A member out of contact
    may be dead, and one that has not joined yet may be a step behind, or stuck."""
    members = [w for name, w in nodes.workers().items() if name in group.worker_ids]
    return any(_has_joined(w.status, group) and w.out_of_contact_since is None for w in members)


def _has_joined(s: WorkerStatus, group: Generation) -> bool:
    trains = s.phase is WorkerPhase.TRAINING and s.generation == group.number
    return s.has_state and (trains or s.phase is WorkerPhase.FINISHED)


def _is_needed(
    s: WorkerStatus,
    current: Generation | None,
    successors: Iterable[WorkerStatus],
    *,
    group_has_it: bool,
) -> bool:
    if current is None or not current.members:
        return may_hold_state(s, current) and not has_successor(s, successors)
    if (
        s.has_state
        and s.phase is WorkerPhase.READY
        and not (group_has_it or has_successor(s, successors))
    ):
        return True
    has_acknowledged = s.phase is not WorkerPhase.READY or s.acknowledged >= current.number
    return s.worker in current.worker_ids or s.phase in _IN_GROUP or not has_acknowledged


class Replacements:
    """The workers that agents were told to end: no decision counts them, although they may still be
    reported.

    A request can be lost with the stream of an agent. A worker that is still there after
    `patience_s` counts again, and its replacement can be requested again.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until: dict[WorkerId, float] = {}

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._until

    @property
    def next_at(self) -> float | None:
        return min(self._until.values(), default=None)

    def ask(self, workers: Iterable[WorkerId], now: float) -> list[WorkerId]:
        """Note the request to end these workers; return those that are not being ended already."""
        news = sorted(set(workers) - self._until.keys())
        self._until.update(dict.fromkeys(news, now + self._patience_s))
        return news

    def others(
        self, workers: Mapping[WorkerId, ObservedWorker], now: float
    ) -> Mapping[WorkerId, ObservedWorker]:
        if not self._until:
            return workers
        self._until = {w: at for w, at in self._until.items() if w in workers and now < at}
        return {name: w for name, w in workers.items() if name not in self._until}


_NAMED_BY_SIGNATURE = (FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.SIGNAL)
"""Kinds whose signatures are equal for the same fault. Others contain times and generations."""

_MOST_KINDS = 1000  # different failures that are remembered: a message may differ every time


@dataclass(frozen=True, kw_only=True, slots=True)
class NewcomerPolicy:
    """How long newcomers are kept out of the group after failures."""

    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=2.0, cap_s=300.0))
    """The delay between two newcomers of one slot, by its failures in a row."""
    same_failures: int = 3
    """All newcomers are refused after the same failure in this many groups, if none has joined
    successfully in between."""
    same_signals: int = 6
    """The same for deaths by one signal, of which each may have its own cause."""
    refusal: Backoff = field(default_factory=lambda: Backoff(base_s=60.0, cap_s=3600.0))
    """How long newcomers are refused, by the number of refusals in a row."""


class Newcomers:
    """Keeps newcomers out of the group after failures. A worker is new until a group has committed
    a step with it.

    Each newcomer that fails while it joins costs the group two changes. The steps that the others
    commit in between say nothing about newcomers, so their failures are counted separately: those
    of each slot, which delay the next newcomer from there; and those that are the same in several
    groups, from any slot, because then no newcomer can join at present, and none is admitted for a
    long time.
    """

    def __init__(self, policy: NewcomerPolicy) -> None:
        self._policy = policy
        self._trained: set[WorkerId] = set()
        self._group: Generation | None = None
        """The newest group in which all members have arrived."""
        self._began_at = 0
        """The steps that were committed then."""
        self._failures: Counter[tuple[NodeId, int]] = Counter()
        self._not_before: dict[tuple[NodeId, int], float] = {}
        self._failed_in: dict[str, set[int]] = defaultdict(set)
        """By failure: generations in which a newcomer failed so since one joined successfully."""
        self._told: set[str] = set()
        self._refusals = 0
        self._refused_until = -math.inf

    # ---- queries

    def is_new(self, worker: WorkerId) -> bool:
        return worker not in self._trained

    def held_back(self, workers: Iterable[ObservedWorker]) -> dict[WorkerId, float]:
        """The instants before which new workers may not join a group that trains."""
        if not self._not_before and self._refusals == 0:
            return {}
        until = {
            w.status.worker: max(self._not_before.get(_slot(w), -math.inf), self._refused_until)
            for w in workers
            if self.is_new(w.status.worker)
        }
        return {worker: at for worker, at in until.items() if at > -math.inf}

    def awaits(self, generation: Generation) -> bool:
        """True if members of the generation have yet to arrive, as far as is known."""
        return self._group is None or self._group.number != generation.number

    # ---- events

    def presume_trained(self, generation: Generation) -> None:
        """Assume that the members have trained: an earlier coordinator formed the generation."""
        self._trained |= generation.worker_ids

    def arrived(self, generation: Generation, workers: Mapping[WorkerId, ObservedWorker]) -> None:
        """All members of `generation` train in it, or have finished."""
        self._group = generation
        counts = [workers[m.worker].status.committed for m in generation.members]
        self._began_at = max(counts, default=0)
        self._trained &= workers.keys()

    def committed(self, generation: int, committed: int) -> None:
        """A member of `generation` has committed this many steps. Its members are not new any more
        if that is a step more than when they began."""
        group = self._group
        if group is None or generation != group.number or committed <= self._began_at:
            return
        new = [m for m in group.members if self.is_new(m.worker)]
        for member in new:
            self._failures.pop((member.node, member.slot), None)
            self._not_before.pop((member.node, member.slot), None)
        if new:
            self._trained |= group.worker_ids
            self._accept()

    def failed(
        self, worker: ObservedWorker, generation: int, failure: Failure, now: float
    ) -> float:
        """A new worker has failed in the group of `generation`, or before it was in any (0).

        Returns for how many seconds no newcomer is admitted from now on, if that should be told;
        else 0.
        """
        slot = _slot(worker)
        self._failures[slot] += 1
        self._not_before[slot] = now + self._policy.backoff.delay_s(self._failures[slot])
        if generation == 0:
            return 0.0
        by_signature = failure.kind in _NAMED_BY_SIGNATURE
        failed_as = failure.signature if by_signature else failure.kind.name
        if failed_as not in self._failed_in and len(self._failed_in) >= _MOST_KINDS:
            self._told.discard(oldest := next(iter(self._failed_in)))
            del self._failed_in[oldest]
        failed_in = self._failed_in[failed_as]
        is_counted = generation in failed_in
        failed_in.add(generation)
        by_signal = failure.kind is FailureKind.SIGNAL
        most = self._policy.same_signals if by_signal else self._policy.same_failures
        hopeless = len(failed_in) >= most or not failure.retryable
        if is_counted or not hopeless:
            return 0.0
        self._refusals += 1
        delay_s = self._policy.refusal.delay_s(self._refusals + 1)
        self._refused_until = now + delay_s
        is_news = failed_as not in self._told
        self._told.add(failed_as)
        return delay_s if is_news else 0.0

    def node_gone(self, node: NodeId) -> None:
        for slot in [slot for slot in self._failures if slot[0] == node]:
            del self._failures[slot], self._not_before[slot]

    def _accept(self) -> None:
        self._refusals, self._refused_until = 0, -math.inf
        self._failed_in.clear()
        self._told.clear()


def _slot(worker: ObservedWorker) -> tuple[NodeId, int]:
    slot = worker.status.slot
    return worker.node, -1 if slot is None else slot
