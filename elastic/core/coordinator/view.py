"""The input of the decision about the group: the policy, the workers, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.core.coordinator.connections import NOTHING_FOUND, Findings
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
    """The sizes of the group, and how long each decision waits, in seconds."""

    min_workers: int = 1
    max_workers: int = 1
    gather_timeout_s: float = 30.0
    """Without a group: how long to wait for more workers once `min_workers` are ready."""
    join_timeout_s: float = 10.0
    """A member that has not acknowledged a new generation after this time is left out."""
    busy_timeout_s: float = 300.0
    """The same for a member that has acknowledged it, but whose script has not reached its next
    step boundary."""
    first_step_s: float = 600.0
    """The same while a member compiles, or in the first step of a group. Infinite: no limit."""
    broken_grace_s: float = 0.25
    """How long to wait for news of a dead member after one has reported a broken group. Each
    fruitless break doubles it."""
    agent_grace_s: float = 0.0
    """How long a node whose stream has ended keeps its place while its group trains on: its agent
    may come back. 0: the node is lost at once."""
    roll_call_s: float = 2.0
    """How long a new coordinator waits for nodes that have not reported to it, even if their group
    does not train. The store tells them at once, and a busy one needs a second: nodes that take
    longer are cut off."""
    probe_interval_s: float = 0.2
    """How often members are asked, while nodes are out of contact, whether the group works."""
    join_debounce_s: float = 0.1
    """Newcomers that arrive within this time of each other join together."""
    planned_interval_s: float = 0.5
    """The least time between two planned changes."""
    max_fruitless_breaks: int = 5
    """The job is given up when the group breaks this often in a row although no member dies, and no
    step is committed in between."""
    probe_s: float = 0.0
    """How long a connection between two members may take when they probe whether they can reach
    each other. 0: they do not probe."""
    restart_all: bool = False
    """The script was written for torchrun: any change of the group restarts all of its workers."""
    give_up_s: float = math.inf
    """The same: how long there may be no group before the job ends."""
    restart_debounce_s: float = 1.0
    """Newcomers that arrive within this time of each other cost the others one such restart."""
    restart_gather_s: float = 5.0
    """Takes the place of `gather_timeout_s` after the first group: the nodes are there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedWorker:
    """A worker as the coordinator knows it: its newest report, its node, and the node's contact."""

    node: NodeId
    status: WorkerStatus
    out_of_contact_since: float | None = None
    """Since when the node has been out of contact; None: it is in contact."""
    in_contact_since: float = -math.inf
    """Since when the worker can learn of generations again."""
    expected: bool = False
    """The node has not reported to this coordinator yet: all of this is what the previous
    coordinator knew or decided."""
    restarting: bool = False
    """The node's agent has said that it is about to start again."""
    on_leaving_node: bool = False
    """The node should no longer take part."""
    left_behind: bool = False
    """The node was out of contact when a group was formed that went on without it."""

    def as_member(self) -> Member:
        s = self.status
        return Member(worker=s.worker, node=self.node, slot=s.slot or 0, endpoint=s.endpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """Everything that the decision depends on. Instants are seconds on the coordinator's clock."""

    current: Generation | None
    workers: Mapping[WorkerId, ObservedWorker]
    """The workers that are alive, as far as is known; not those being replaced, unless all are."""
    slots: int
    """The slots of all nodes that take part: how many workers to expect while gathering."""
    previous_group: Generation | None = None
    """The group that trains until `current`, a planned change, is in place."""
    formed_at: float = 0.0
    """When the store had taken `current`, or when this coordinator took it over from an earlier
    one."""
    unannounced: bool = False
    """`current` was just written, and has not been announced."""
    assembling_since: float | None = None
    """Since when members move to `current`: its announcement, or when nobody takes garbage any
    more; if planned, the first arrival."""
    enough_since: float | None = None
    """Since when `min_workers` have been ready without a group."""
    adopted_at: float | None = None
    """When this coordinator took over from another one; None: it has formed a group since, or there
    was no earlier coordinator."""
    agents_return_until: float = -math.inf
    """Until when agents may still report a group that the store has lost."""
    no_group_since: float | None = None
    """Since when there has been no group."""
    broken_since: float | None = None
    """Since when a member has reported its group broken."""
    newcomers_since: float | None = None
    """Since when a worker outside of `current` has been ready."""
    trained_in: int = 0
    """The newest generation in which a worker is known to have trained."""
    is_slow: bool = False
    """A member compiles, or the group's first step is under way."""
    slow_until: float = -math.inf
    """Until when `is_slow` was true the last time."""
    quiet_since: float | None = None
    """Since when the group has stood still, if that is longer than a usual step; else None."""
    findings: Findings = NOTHING_FOUND
    """What the newest round of probes between workers has found."""
    probed_by: float = -math.inf
    """Until when the round under way is answered."""
    fruitless_breaks: int = 0
    stalled: bool = False
    """The step under way lasts suspiciously long, or members wait too long for another one."""
    stuck: bool = False
    """The member that was asked last says that its step lasts longer than usual."""
    held_back: Mapping[WorkerId, float] = field(default_factory=dict)
    """Newcomers that may not join before these instants, because others have failed."""
    released_nodes: frozenset[NodeId] = frozenset()
    """Nodes that were told that they are not needed: their workers end."""
    save_by: float = math.inf
    """While the job stops: when its grace ends, if only members have the last step."""
    past_members: frozenset[WorkerId] = frozenset()
    """Members of all remembered generations. Empty unless all workers restart together."""


def agent_has_heard_from(w: ObservedWorker) -> bool:
    """True if the worker's agent has heard from it. A new agent that has found the worker running
    learns its slot only then; a worker that stays silent may never run again."""
    return w.status.slot is not None


def return_patience_s(policy: FormationPolicy) -> float:
    """How long a new coordinator waits for nodes with which the previous one was in contact."""
    return max(policy.agent_grace_s, policy.join_timeout_s)


def may_hold_state(s: WorkerStatus, current: Generation | None) -> bool:
    """True if the worker has the job's state, or may have received it since its last report.

    It may have received the state if it can join the newest generation as a member, or if it can
    still join an earlier one because it has not acknowledged the newest. False for a worker whose
    script has ended: it no longer needs the state.
    """
    if s.has_state or s.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING):
        return s.phase is not WorkerPhase.FINISHED
    if s.phase is not WorkerPhase.READY or current is None:
        return False
    return s.acknowledged < current.number or s.worker in current.worker_ids


def has_successor(s: WorkerStatus, others: Iterable[WorkerStatus]) -> bool:
    """True if one of the others has the state with at least as many steps. Only READY workers
    count: they have left their last groups, so they will never have more than they report."""
    return s.phase is WorkerPhase.READY and any(
        o.phase is WorkerPhase.READY
        and o.has_state
        and o.generation >= s.generation
        and o.committed >= s.committed
        for o in others
    )


def worth_waiting_for(workers: Mapping[WorkerId, ObservedWorker]) -> list[ObservedWorker]:
    """The workers out of contact. Those left behind are not among them if a worker in contact has
    the state: as a member of the group that went on, it has all that they hold."""
    here = any(w.status.has_state and w.out_of_contact_since is None for w in workers.values())
    out_of_contact = [w for w in workers.values() if w.out_of_contact_since is not None]
    return [w for w in out_of_contact if not (w.left_behind and here)]


def enough(workers: Mapping[WorkerId, ObservedWorker], policy: FormationPolicy) -> bool:
    """True if a group can be formed. Members that have finished count towards the minimum, so that
    the others need not wait for replacements."""
    ready = finished = 0
    for w in workers.values():
        if w.status.phase is WorkerPhase.READY:
            ready += not w.on_leaving_node
        elif w.status.phase is WorkerPhase.FINISHED:
            finished += 1
    return ready > 0 and ready + finished >= policy.min_workers
