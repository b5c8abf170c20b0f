"""Decides, while the job stops, which workers save; and how a job ends, with which exit code."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator.decisions import (
    Complete,
    Decision,
    End,
    Form,
    GiveUp,
    TooFew,
    Wait,
    WaitReason,
)
from elastic.core.coordinator.formation import (
    decide,
    furthest_ahead,
    most_steps,
    nothing_left_to_do,
)
from elastic.core.coordinator.view import (
    FormationPolicy,
    GroupView,
    ObservedWorker,
    agent_has_heard_from,
    may_hold_state,
    return_patience_s,
    worth_waiting_for,
)
from elastic.core.coordinator.whole_restart import stop_whole
from elastic.core.membership import (
    ChangeReason,
    Failure,
    Generation,
    Member,
    Purpose,
    WorkerPhase,
)
from elastic.core.restarts import Verdict
from elastic.errors import ExitCode

EXIT_LEFT = int(ExitCode.TERMINATED)  # the job is not done


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A request to stop the job."""

    exit_code: int
    reason: str
    deadline: float
    """Nobody waits for workers that have not saved by then."""
    give_up_at: float = math.inf
    """From then on no member may go on with its step: what it began from is saved."""
    inherited: bool = False
    """An earlier coordinator began it. Another request for a stop replaces it."""


def within_grace(exit_code: int, reason: str, *, now: float, grace_s: float, save_s: float) -> Stop:
    """A stop that is asked for now. save_s: the end of the grace that is kept for members to come
    to the save, and for the save itself, which is at most half of it; 0: nothing is saved."""
    deadline = now + grace_s
    give_up_at = deadline - min(save_s, grace_s / 2)
    return Stop(exit_code=exit_code, reason=reason, deadline=deadline, give_up_at=give_up_at)


def inherited(*, now: float, grace_s: float, save_s: float) -> Stop:
    """The stop that an earlier coordinator began with its last generation: it cannot be undone."""
    reason = "an earlier coordinator was asked to stop the job"
    stop = within_grace(EXIT_LEFT, reason, now=now, grace_s=grace_s, save_s=save_s)
    return replace(stop, inherited=True)


def decide_stop(view: GroupView, policy: FormationPolicy, stop: Stop, now: float) -> Decision | End:
    current = view.current
    if current is None and now < (until := min(view.agents_return_until, stop.deadline)):
        return Wait(reason=WaitReason.ASSEMBLING, until=until)
    if policy.restart_all:
        return stop_whole(view, stop.deadline, now)
    grouped = current is not None and len(current.members) > 0
    out_of_contact = worth_waiting_for(view.workers)
    holders = [
        w
        for w in view.workers.values()
        if may_hold_state(w.status, current)
        and (w.out_of_contact_since is None or w in out_of_contact)
    ]
    if now >= stop.deadline:
        return End(in_time=not grouped and not holders)
    if current is None or not grouped:
        return _gather_to_save(view, policy, holders, stop, now)
    groups = [g for g in (current, view.previous_group) if g is not None]
    names = frozenset[str]().union(*(g.worker_ids for g in groups))
    members = {name: w for name, w in view.workers.items() if name in names}
    active = [w for w in members.values() if not _finished(w)]
    in_contact = all(w.out_of_contact_since is None for w in members.values())
    outside = [w for name, w in view.workers.items() if name not in members]
    others = [w for w in outside if _is_holder(w)]
    busy = [w for w in outside if _is_busy(w)]
    finished = [w for w in view.workers.values() if _finished(w)]
    if nothing_left_to_do(finished, [w for w in view.workers.values() if not _finished(w)]):
        return Complete()  # newcomers among the members have nothing to save
    can_leave = active and in_contact and not _is_away(active, view)
    if can_leave and view.formed_at < stop.give_up_at <= now and _are_in_step(current, active):
        # Members that do not come to the boundary may only be slow: they are told to come at once.
        late = Form(members=_told(active), reason=ChangeReason.STALLED)
        ahead = furthest_ahead(others + busy, active, view)
        return late if ahead is None else _with(late, ahead)
    if can_leave and _is_to_be_left(current, view):
        is_whole = current.worker_ids.issubset(members) and len(active) == len(members)
        left = _leave(current, active, is_whole=is_whole)
        ahead = None if left.planned else furthest_ahead(others + busy, active, view)
        return left if ahead is None else _with(left, ahead)
    ahead = furthest_ahead(busy, others, view)
    others += [ahead] if ahead is not None else []
    # Members out of contact, as all are for a new leader, may have more steps than these.
    if others and in_contact and not any(w.status.has_state for w in members.values()):
        return _leave(current, active + others, is_whole=False)  # these have it to save
    # Nobody else is admitted any more, nobody leaves before the others, and any number of survivors
    # can save. A worker left behind and out of contact may hold the state when no member does.
    left_behind = {name: w for name, w in view.workers.items() if w.left_behind}
    alike = {name: replace(w, on_leaving_node=False) for name, w in (left_behind | members).items()}
    save_s = stop.deadline - stop.give_up_at
    join_s = min(policy.join_timeout_s, save_s / 2) if save_s > 0.0 else policy.join_timeout_s
    only_members = most_steps(members.values()) > most_steps(w for w in others if _is_holder(w))
    save_by = stop.deadline if only_members else -math.inf
    known = replace(view, workers=alike, save_by=save_by)
    decision = decide(known, replace(policy, min_workers=1, join_timeout_s=join_s), now)
    if not isinstance(decision, Form):
        return decision
    chosen = [view.workers[m.worker] for m in decision.members]
    if any(w.status.has_state for w in chosen):
        ahead = furthest_ahead(others + busy, chosen, view)
        return decision if ahead is None else _with(decision, ahead)
    # Nobody here is known to hold the state. After a lost transfer members may have only parts of
    # it, and a group of these would lose them one by one: first each reports what it has.
    with_state = tuple(w.as_member() for w in others)
    return replace(decision, members=(*decision.members, *with_state) if with_state else ())


def _is_to_be_left(current: Generation, view: GroupView) -> bool:
    """True if the group should be left: it trains, or has saved since before a change of leader,
    which may have lost reports of saves and the news that they are complete."""
    return current.purpose is Purpose.TRAIN or view.adopted_at is not None


def _is_away(active: list[ObservedWorker], view: GroupView) -> bool:
    """True if only members of earlier groups hold the state, as far as is known. They are out of
    contact, or back and not yet out of their group."""
    if any(w.status.has_state for w in active) or view.trained_in == 0:
        return False
    out_of_contact = worth_waiting_for(view.workers)
    return any(
        w.status.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING) or w.status.has_state
        for w in view.workers.values()
        if w not in active
        and not _finished(w)
        and (w.out_of_contact_since is None or w in out_of_contact)
    )


def _finished(w: ObservedWorker) -> bool:
    return w.status.phase is WorkerPhase.FINISHED


def _is_holder(w: ObservedWorker) -> bool:
    return (
        w.status.phase is WorkerPhase.READY
        and w.status.has_state
        and w.out_of_contact_since is None
    )


def _is_busy(w: ObservedWorker) -> bool:
    """True if the worker was left behind with the state and is still in its group, where it
    evaluates or has to end a long step."""
    in_group = w.status.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING)
    return (
        in_group
        and w.status.has_state
        and w.out_of_contact_since is None
        and agent_has_heard_from(w)
    )


def _leave(current: Generation, active: list[ObservedWorker], *, is_whole: bool) -> Form:
    """Leave at a step boundary if the group trains. It reaches none if it assembles or saves, has
    lost a member, or has one whose script has ended."""
    trains = (
        current.purpose is Purpose.TRAIN
        and is_whole
        and all(
            w.status.phase is WorkerPhase.TRAINING and w.status.generation == current.number
            for w in active
        )
    )
    return Form(members=_told(active), reason=ChangeReason.STOPPING, planned=trains)


def _are_in_step(current: Generation, active: list[ObservedWorker]) -> bool:
    """True if a member has not left the group that trained."""
    return any(
        w.status.phase is WorkerPhase.TRAINING
        and (w.status.generation < current.number or current.purpose is Purpose.TRAIN)
        for w in active
    )


def _told(active: list[ObservedWorker]) -> tuple[Member, ...]:
    return tuple(w.as_member() for w in active if agent_has_heard_from(w))


def _with(decision: Form, ahead: ObservedWorker) -> Form:
    """Add a worker that was cut off and has come back with more steps than the others have."""
    return replace(decision, members=(*decision.members, ahead.as_member()))


def _gather_to_save(
    view: GroupView,
    policy: FormationPolicy,
    holders: list[ObservedWorker],
    stop: Stop,
    now: float,
) -> Decision | End:
    """Decide without a group: survivors may hold unsaved state in memory; newcomers have none."""
    current = view.current
    if current is not None and current.leave_after is not None and holders:
        return Form(members=(), reason=ChangeReason.STOPPING)  # now, not at the next boundary
    known = [w for w in holders if w.status.has_state and w.out_of_contact_since is None]
    ready = [w for w in known if w.status.phase is WorkerPhase.READY]
    patient_until = _patient_until(view, policy, holders)
    all_are_here = view.adopted_at is None and len(ready) == len(holders)
    if ready and (all_are_here or now >= patient_until):
        return Form(members=tuple(w.as_member() for w in ready), reason=ChangeReason.STOPPING)
    late = [w for w in known if _may_have_steps(w, current)]
    if view.formed_at < stop.give_up_at <= now and (told := _told(late)):
        return Form(members=told, reason=ChangeReason.STALLED)  # not by themselves in time
    if now < patient_until:
        return Wait(reason=WaitReason.ASSEMBLING, until=patient_until)
    if late:
        return Wait(reason=WaitReason.ASSEMBLING)
    in_first = [w for w in known if w.status.phase is WorkerPhase.TRAINING]
    since = max((max(view.formed_at, w.in_contact_since) for w in in_first), default=-math.inf)
    if now < (until := since + policy.join_timeout_s):
        return Wait(reason=WaitReason.ASSEMBLING, until=until)
    return End(in_time=True)  # the others do not answer or are stuck, and have committed no step


def _may_have_steps(w: ObservedWorker, current: Generation | None) -> bool:
    """True if the worker has committed a step, or trains and may not have reported one yet.

    Once it has acknowledged that its group is dissolved, its count is right: it counted its steps
    then and was freed from the step under way, so it comes out soon unless it is stuck.
    """
    s = w.status
    if s.committed > 0 or s.phase is not WorkerPhase.TRAINING:
        return s.committed > 0
    return current is None or s.acknowledged < current.number


def _patient_until(
    view: GroupView, policy: FormationPolicy, holders: list[ObservedWorker]
) -> float:
    """Until when members of the last group may come out of it, and agents may come back, or come to
    a new leader."""
    instants = [view.formed_at + policy.join_timeout_s] if holders else []
    since = [w.out_of_contact_since for w in holders if w.out_of_contact_since is not None]
    if since:
        instants.append(max(since) + policy.agent_grace_s)
    if view.adopted_at is not None:
        instants.append(view.adopted_at + return_patience_s(policy))
    return max(instants, default=-math.inf)


def end_complete(stop: Stop | None) -> fx.EndJob:
    if stop is None:
        return fx.EndJob(exit_code=0)
    return fx.EndJob(exit_code=stop.exit_code, message=stop.reason)


def end_failed(verdict: Verdict, failure: Failure, hang: str = "") -> fx.EndJob:
    """The end after a failure that no restart follows. hang: the verdict about the last hang, used
    if the worker failed because it hung."""
    may_not_pass = verdict is Verdict.NOT_RETRYABLE
    exit_code = ExitCode.CONFIGURATION if may_not_pass else ExitCode.SCRIPT_FAILED
    exit_code = ExitCode.NOT_SAVED if failure.state_lost else exit_code
    message = hang if failure.place else ""
    return fx.EndJob(exit_code=int(exit_code), verdict=verdict, failure=failure, message=message)


def end_given_up(decision: GiveUp) -> fx.EndJob:
    message = (
        "the group keeps breaking although no member is lost and no step is committed; "
        f"a member reported: {decision.detail}"
    )
    return fx.EndJob(exit_code=int(ExitCode.SCRIPT_FAILED), message=message)


def end_too_few(decision: TooFew) -> fx.EndJob:
    message = (
        f"only {decision.ready} of at least {decision.wanted} workers were ready within "
        f"{decision.within_s:g} s; start the missing nodes sooner, or give them more time "
        "(torchrun: --rdzv-conf join_timeout=SECONDS; timeout=SECONDS with static rendezvous)"
    )
    return fx.EndJob(exit_code=int(ExitCode.SCRIPT_FAILED), message=message)


def end_stopped(stop: Stop, *, in_time: bool, grace_s: float, restart_all: bool) -> fx.EndJob:
    """The end as requested, or after a grace in which the workers did not save and leave."""
    if in_time:
        return fx.EndJob(exit_code=stop.exit_code, message=stop.reason)
    missed = "end" if restart_all else "reach a step boundary and save"
    message = f"the workers did not {missed} within {grace_s:g} s of: {stop.reason}"
    return fx.EndJob(exit_code=stop.exit_code, message=message)
