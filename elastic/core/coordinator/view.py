"""What the decision about the group depends on: the policy, the workers, what is known of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.membership import (
    Generation,
    Member,
    NodeId,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormationPolicy:
    """Sizes of the group and the patience of each decision, in seconds."""

    min_workers: int = 1
    max_workers: int = 1
    gather_timeout_s: float = 30.0
    """Wait this long for the rest once `min_workers` are ready and no group exists."""
    join_timeout_s: float = 10.0
    """A member that has not even acknowledged a generation by then is left out."""
    busy_timeout_s: float = 300.0
    """The same for one that has, but whose script does not get to its next step boundary."""
    first_step_s: float = 600.0
    """The same while one compiles, or in the first step of a group. Infinite: no limit."""
    broken_grace_s: float = 0.25
    """Wait this long for news of a death after a member reported a broken group."""
    agent_grace_s: float = 0.0
    """A node whose stream has ended keeps its place this long while its group trains on: its agent
    may come back. 0: it is lost at once."""
    roll_call_s: float = 1.0
    """A new coordinator waits this long for nodes that it has not heard of, even if their group
    does not train. The store tells them of it at once, so nodes that come later are cut off."""
    probe_interval_s: float = 0.2
    """How often members are asked meanwhile whether the group still works."""
    join_debounce_s: float = 0.1
    """Newcomers that arrive within this of each other join together."""
    planned_interval_s: float = 0.5
    """Least time between two planned changes."""
    max_fruitless_breaks: int = 5
    """A group that breaks this often with nobody dead and no step committed never will commit."""
    restart_all: bool = False
    """The script was written for torchrun: any change of the group restarts all of its workers."""
    restart_debounce_s: float = 1.0
    """Newcomers that arrive within this of each other cost the others one such restart."""
    restart_gather_s: float = 5.0
    """`gather_timeout_s` when the workers have run before: their nodes are there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedWorker:
    """A worker and the node it was reported by."""

    node: NodeId
    status: WorkerStatus
    silent_since: float | None = None
    """Since when its node has been out of contact; None: it is in contact."""
    in_contact_since: float = -math.inf
    """Since when it can hear of generations again."""
    expected: bool = False
    """Not seen by this coordinator yet: it is what the one before knew, or decided."""
    leaving: bool = False
    """Its node is to take no part any more."""
    left_behind: bool = False
    """Out of contact when a group was formed, which went on without it."""

    def as_member(self) -> Member:
        """This worker as a member of a generation."""
        s = self.status
        return Member(worker=s.worker, node=self.node, slot=s.slot or 0, endpoint=s.endpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """Everything the decision depends on. Instants are seconds on the coordinator's clock."""

    current: Generation | None
    workers: Mapping[WorkerId, ObservedWorker]
    """Workers alive now."""
    slots: int
    """Slots on all connected nodes: how many workers to expect while gathering."""
    leaving: Generation | None = None
    """The group that trains until `current`, a planned change, is in place."""
    formed_at: float = 0.0
    """When `current` was announced."""
    untold: bool = False
    """Nobody has been told of `current`, which was written a moment ago."""
    assembling_since: float | None = None
    """Since when members leave for `current`: announced, or the first arrival if planned."""
    enough_since: float | None = None
    """Since when `min_workers` are ready and no group exists."""
    adopted_at: float | None = None
    """Since when this coordinator leads in place of another; None: it was the first."""
    agents_return_until: float = -math.inf
    """Until then agents may tell of a group that the store has lost."""
    broken_since: float | None = None
    """Since when a member of `current` has reported it broken."""
    newcomers_since: float | None = None
    """Since when a worker that is not in `current` is ready."""
    trained_in: int = 0
    """The newest generation that a member is known to have trained in."""
    slow: bool = False
    """A member compiles, or the group's first step is under way."""
    slow_at: float = -math.inf
    """When that was so last."""
    fruitless_breaks: int = 0
    stalled: bool = False
    """The step under way lasts suspiciously long."""
    stuck: bool = False
    """Asked since a node fell silent, a member said that its step lasts longer than usual."""
    held_back: Mapping[WorkerId, float] = field(default_factory=dict)
    """Newcomers that are not to be let in before these instants, since others have failed."""
    let_go: frozenset[NodeId] = frozenset()
    """Nodes that were told that they are not needed: their workers end."""
    save_by: float = math.inf
    """While the job stops: when its grace ends, if only members have the last step."""
    spent: frozenset[WorkerId] = frozenset()
    """Members of earlier generations, as far back as remembered."""


def is_in_sight(w: ObservedWorker) -> bool:
    """Its agent has heard from it. A new one that has found it running learns its slot only then,
    and one that stays silent may never run again."""
    return w.status.slot is not None


def return_patience_s(policy: FormationPolicy) -> float:
    """How long a new coordinator waits for nodes that the one before was in contact with."""
    return max(policy.agent_grace_s, policy.join_timeout_s)


def may_hold_state(s: WorkerStatus, current: Generation | None) -> bool:
    """It has the job's state, or may have got it since it reported: it could join the newest
    generation, or an earlier one, since it has not acknowledged the newest. A worker whose script
    has ended needs it no more."""
    if s.has_state or s.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING):
        return s.phase is not WorkerPhase.FINISHED
    if s.phase is not WorkerPhase.READY or current is None:
        return False
    return s.acknowledged < current.number or s.worker in current.worker_ids


def has_heir(s: WorkerStatus, others: Iterable[WorkerStatus]) -> bool:
    """One of the others has as much of the state: all are out of their last groups, so that what
    they report is all they will ever have."""
    return s.phase is WorkerPhase.READY and any(
        o.phase is WorkerPhase.READY
        and o.has_state
        and o.generation >= s.generation
        and o.committed >= s.committed
        for o in others
    )


def worth_waiting_for(workers: Mapping[WorkerId, ObservedWorker]) -> list[ObservedWorker]:
    """Workers out of contact. Those left behind do not count if a member of a group that went on is
    here, and has all that they hold."""
    here = any(w.status.has_state and w.silent_since is None for w in workers.values())
    silent = [w for w in workers.values() if w.silent_since is not None]
    return [w for w in silent if not (w.left_behind and here)]


def enough(workers: Mapping[WorkerId, ObservedWorker], policy: FormationPolicy) -> bool:
    """Can a group be formed? Members that have finished are no reason to wait for others."""
    ready = finished = 0
    for w in workers.values():
        if w.status.phase is WorkerPhase.READY:
            ready += not w.leaving
        elif w.status.phase is WorkerPhase.FINISHED:
            finished += 1
    return ready > 0 and ready + finished >= policy.min_workers
