"""Decides about scripts that cannot change their group: all workers restart, as in torchrun.

A generation without members dissolves the group first. Then the agents end the workers that have
run, and when none of these is left, fresh workers form the next group.
"""

from __future__ import annotations

from elastic.core.coordinator.decisions import (
    Complete,
    Decision,
    End,
    Form,
    TooFew,
    Wait,
    WaitReason,
)
from elastic.core.coordinator.view import (
    FormationPolicy,
    GroupView,
    ObservedWorker,
    return_patience_s,
)
from elastic.core.membership import ChangeReason, Generation, WorkerId, WorkerPhase


def decide_whole(view: GroupView, policy: FormationPolicy, now: float) -> Decision:
    if view.current is None or not view.current.members:
        return _gather(view, policy, now)
    return _watch(view, view.current, policy, now)


def stop_whole(view: GroupView, deadline: float, now: float) -> Decision | End:
    """Decide what happens while the job stops: there is no state to save here.

    deadline: nobody waits for workers that have not ended by then.
    """
    current = view.current
    if current is not None and current.members:
        present = [view.workers[m.worker] for m in current.members if m.worker in view.workers]
        if len(present) == current.world_size and all(map(_finished, present)):
            return Complete()
        if now < deadline:
            return _dissolve(ChangeReason.STOPPING)
        return End(in_time=not present)
    running = _is_ending(view)
    if running and now < deadline:
        return Wait(reason=WaitReason.ENDING_THE_LAST_GROUP)
    return End(in_time=not running)


def _gather(view: GroupView, policy: FormationPolicy, now: float) -> Decision:
    """Start when all workers that can come are ready, or after a timeout."""
    if _is_ending(view):
        # These may even train, in a group that a new leader does not know.
        return Wait(reason=WaitReason.ENDING_THE_LAST_GROUP)
    ready = _fresh(view)
    if len(ready) < (wanted := max(1, policy.min_workers)):
        since = now if view.no_group_since is None else view.no_group_since
        give_up_at = since + policy.give_up_s
        if now >= give_up_at:
            return TooFew(ready=len(ready), wanted=wanted, within_s=policy.give_up_s)
        return Wait(reason=WaitReason.BELOW_MINIMUM, until=give_up_at)
    if len(ready) < min(view.slots, policy.max_workers):
        first = view.current is None
        patience_s = policy.gather_timeout_s if first else policy.restart_gather_s
        since = now if view.enough_since is None else view.enough_since
        if now < since + patience_s:
            return Wait(reason=WaitReason.GATHERING, until=since + patience_s)
    chosen = sorted(ready, key=lambda w: (w.node, w.status.slot or 0))[: policy.max_workers]
    return Form(members=tuple(w.as_member() for w in chosen), reason=ChangeReason.STARTED)


def _watch(view: GroupView, current: Generation, policy: FormationPolicy, now: float) -> Decision:
    """Decide while a group exists: only its end, a loss or a change of nodes matters."""
    present = [view.workers[m.worker] for m in current.members if m.worker in view.workers]
    if len(present) < current.world_size:
        return _dissolve(ChangeReason.MEMBER_LOST)
    if all(map(_finished, present)):
        return Complete()
    out_of_contact = [w for w in present if w.out_of_contact_since is not None]
    if out_of_contact:
        return _await_contact(out_of_contact, len(out_of_contact) == len(present), policy, now)
    late = [w for w in present if not _arrived(w, current)]
    if late:
        until = view.formed_at + policy.join_timeout_s
        if now < until:
            return Wait(reason=WaitReason.ASSEMBLING, until=until)
        names = frozenset(w.status.worker for w in late)
        return _dissolve(ChangeReason.JOIN_TIMED_OUT, left_out=names)
    if any(w.on_leaving_node and not _finished(w) for w in present):
        return _dissolve(ChangeReason.MEMBER_LEAVING)
    if any(map(_finished, present)):
        return Wait(reason=WaitReason.STEADY)  # the job is about to end: it admits nobody
    return _admit(view, current, policy, now)


def _await_contact(
    out_of_contact: list[ObservedWorker], are_all: bool, policy: FormationPolicy, now: float
) -> Decision:
    """Members out of contact run on for a while. If all are, the coordinator is cut off: wait."""
    if are_all:
        return Wait(reason=WaitReason.OUT_OF_CONTACT)
    expected = any(w.expected for w in out_of_contact)
    patience_s = return_patience_s(policy) if expected else policy.agent_grace_s
    until = (
        min(w.out_of_contact_since for w in out_of_contact if w.out_of_contact_since is not None)
        + patience_s
    )
    if now < until:
        return Wait(reason=WaitReason.OUT_OF_CONTACT, until=until)
    return _dissolve(ChangeReason.MEMBER_LOST)


def _admit(view: GroupView, current: Generation, policy: FormationPolicy, now: float) -> Decision:
    """Collect newcomers, because each change costs all workers a restart."""
    if current.world_size >= policy.max_workers or not _fresh(view):
        return Wait(reason=WaitReason.STEADY)
    since = now if view.newcomers_since is None else view.newcomers_since
    until = max(since, view.formed_at) + policy.restart_debounce_s
    if now < until:
        return Wait(reason=WaitReason.COLLECTING_NEWCOMERS, until=until)
    return _dissolve(ChangeReason.MEMBER_JOINED)


def _dissolve(reason: ChangeReason, left_out: frozenset[WorkerId] = frozenset()) -> Form:
    return Form(members=(), reason=reason, left_out=left_out)


def _fresh(view: GroupView) -> list[ObservedWorker]:
    """Workers that are ready and have not run yet, on nodes that stay."""
    members = view.current.worker_ids if view.current is not None else frozenset()
    return [
        w
        for w in view.workers.values()
        if w.status.phase is WorkerPhase.READY
        and w.out_of_contact_since is None
        and not w.on_leaving_node
        and w.status.worker not in members
        and not _has_run(w, view)
    ]


def _is_ending(view: GroupView) -> bool:
    """True if a worker in contact has run and is not gone yet. Workers out of contact do not
    count: their scripts wait for the others, and the lineage decides whether a group may follow."""
    return any(_has_run(w, view) for w in view.workers.values() if w.out_of_contact_since is None)


def _has_run(w: ObservedWorker, view: GroupView) -> bool:
    return w.status.generation > 0 or w.status.worker in view.past_members


def _finished(w: ObservedWorker) -> bool:
    return w.status.phase is WorkerPhase.FINISHED


def _arrived(w: ObservedWorker, current: Generation) -> bool:
    return w.status.generation == current.number and (
        w.status.phase in (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
    )
