"""Decides from everything that is known now whether the group should change, and into what.

Level-triggered: every change leads to another decision from the whole view, so a missed report
costs nothing. The decision has no effects and no memory; the machine owns both. The lower part of
the module serves to carry it out: the ranks of the members, the step boundary of a planned change,
and the clocks of the conditions with which the decision is patient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.coordinator.decisions import Complete, Decision, Form, GiveUp, Wait, WaitReason
from elastic.core.coordinator.reachability import FRESH_S, able_to_work
from elastic.core.coordinator.view import (
    FormationPolicy,
    GroupView,
    ObservedWorker,
    agent_has_heard_from,
    enough,
    has_successor,
    may_hold_state,
    return_patience_s,
    worth_waiting_for,
)
from elastic.core.coordinator.whole_restart import decide_whole
from elastic.core.membership import (
    ChangeReason,
    Generation,
    Member,
    NodeId,
    Purpose,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)

_IN_GROUP = (WorkerPhase.JOINING, WorkerPhase.TRAINING)
_COMING = (WorkerPhase.STARTING, WorkerPhase.PREPARING)


def decide(view: GroupView, policy: FormationPolicy, now: float) -> Decision:
    if policy.restart_all:
        return decide_whole(view, policy, now)
    if view.current is None or not view.current.members:
        return _gather(view, policy, now)
    return _Formed(view, policy, now).decide()


def _gather(view: GroupView, policy: FormationPolicy, now: float) -> Decision:
    """Decide without a group: start when all workers that can come are ready, or after a timeout.

    Members that were in the middle of `session.run` finish that call first, among themselves, even
    if they are too few to train: a newcomer cannot take part in it.
    """
    until = _others_return_until(view, policy)
    if now < until:
        return Wait(reason=WaitReason.ASSEMBLING, until=until)
    if any(w.out_of_contact_since is not None for w in _still_to_freeze(view)):
        return Form(members=(), reason=ChangeReason.MEMBER_LOST)
    parted = _is_for_parted(view)
    in_contact = {name: w for name, w in view.workers.items() if w.out_of_contact_since is None}
    if len(in_contact) < len(view.workers):
        view = replace(view, workers=in_contact)
    staying = [w for w in view.workers.values() if not w.on_leaving_node]
    ready = [w for w in view.workers.values() if _takes_part(w, staying)]
    finished = [w for w in view.workers.values() if w.status.phase is WorkerPhase.FINISHED]
    coming = [w for w in staying if w.status.phase in _COMING]
    returning = [w for w in view.workers.values() if w.status.phase in _IN_GROUP]
    if finished and not ready and not coming and not returning:
        return Complete()
    if nothing_left_to_do(finished, ready + returning):
        return Complete()
    if returning:
        return _await_return(view, policy, now, returning)
    ready = able_to_work(ready, view.findings)
    if any(map(_repeats, ready)):
        chosen = sorted(_without_stateless_if_in_run(ready), key=_seniority)[: policy.max_workers]
        return Form(members=_members(chosen), reason=ChangeReason.STARTED)
    if not enough(view.workers, policy) or len(ready) + len(finished) < policy.min_workers:
        return Wait(reason=WaitReason.BELOW_MINIMUM)
    expected = min(view.slots - len(finished), policy.max_workers)
    if sum(not w.on_leaving_node for w in ready) < expected and not parted:
        since = now if view.enough_since is None else view.enough_since
        deadline = since + policy.gather_timeout_s
        if now < deadline:
            return Wait(reason=WaitReason.GATHERING, until=deadline)
    chosen = sorted(ready, key=_seniority)[: policy.max_workers]
    reason = ChangeReason.GROUP_BROKEN if parted else ChangeReason.STARTED
    return Form(members=_members(chosen), reason=reason)


def _others_return_until(view: GroupView, policy: FormationPolicy) -> float:
    """Until when holders of the state may come back before a group is formed where there is none,
    as may workers that have lost their agent."""
    until = -math.inf if view.adopted_at is None else view.adopted_at + return_patience_s(policy)
    # Members that cannot reach each other wait for nobody: the group stands still, or is broken.
    if _is_for_parted(view) and any(map(_holds_here, view.workers.values())):
        return until
    away = [w.out_of_contact_since or 0.0 for w in worth_waiting_for(view.workers)]
    return max([until, *(since + policy.agent_grace_s for since in away)])


def _is_for_parted(view: GroupView) -> bool:
    """True if the group was dissolved because its members do not reach each other."""
    return view.current is not None and view.current.reason is ChangeReason.GROUP_BROKEN


def _holds_here(w: ObservedWorker) -> bool:
    return w.status.has_state and w.out_of_contact_since is None


def _takes_part(w: ObservedWorker, staying: list[ObservedWorker]) -> bool:
    """True if the worker is ready, and stays or hands over state that no other one has."""
    s = w.status
    hands_over = s.has_state and not has_successor(s, [other.status for other in staying])
    return s.phase is WorkerPhase.READY and (hands_over or not w.on_leaving_node)


def _without_stateless_if_in_run(workers: list[ObservedWorker]) -> list[ObservedWorker]:
    """Drop the workers without the state if a holder is in the middle of `session.run`: a script
    that has not come to that call cannot take part in it."""
    return [w for w in workers if w.status.has_state] if any(map(_repeats, workers)) else workers


def _repeats(w: ObservedWorker) -> bool:
    """True if the worker is inside `session.run`, with the state that belongs to the call."""
    return w.status.has_state and w.status.in_run


def nothing_left_to_do(finished: list[ObservedWorker], others: list[ObservedWorker]) -> bool:
    """True if finished members have brought the job to its end and no other worker is near it.

    A worker is near it if it trains, or lacks at most the last step, which it may have lost with
    its group. The others would repeat more, or hold a state from which the job has gone back since.
    """
    ends = [w.status for w in finished if w.status.has_state]
    if not ends:
        return False
    last = max(s.committed for s in ends)
    trained_in = max(s.trained_in for s in ends)
    return not any(
        w.status.has_state
        and (
            w.status.phase is WorkerPhase.TRAINING
            or (w.status.committed >= last - 1 and not 0 < w.status.trained_in < trained_in)
        )
        for w in others
    )


def _await_return(
    view: GroupView, policy: FormationPolicy, now: float, returning: list[ObservedWorker]
) -> Decision:
    """Wait for members that come out of a dissolved group: they hold the state.

    A new leader that knows no generation waits without limit: these workers train, and no second
    group may train beside them. The time of a worker that comes back into contact starts then,
    because it could not learn before that its group is dissolved.
    """
    if view.current is None:
        return Wait(reason=WaitReason.STEADY)
    previous = view.previous_group
    if previous is not None and (
        not previous.worker_ids <= view.workers.keys()
        or broke_before(view.current, previous, view.workers)
    ):
        # The others may wait for the missing one at a call, where no connection shows its death.
        return Form(members=(), reason=ChangeReason.MEMBER_LOST)
    since = max(view.formed_at, *(w.in_contact_since for w in returning))
    until = _busy_until(view, policy, since)
    if now < until:
        return Wait(reason=WaitReason.ASSEMBLING, until=until)
    if view.current.leave_after is not None:  # one of them may keep the others from the boundary
        return Form(members=(), reason=ChangeReason.STALLED)
    names = frozenset(w.status.worker for w in returning)
    return Form(members=(), reason=ChangeReason.JOIN_TIMED_OUT, left_out=names)


def _busy_until(view: GroupView, policy: FormationPolicy, since: float) -> float:
    """The instant by which members must reach a step boundary. A slow step gives more time to the
    members that are in it, and to those that wait for them in it."""
    if view.is_slow:
        return since + max(policy.busy_timeout_s, policy.first_step_s)
    return max(since, view.slow_until) + policy.busy_timeout_s


def _seniority(worker: ObservedWorker) -> tuple[bool, int, NodeId, int]:
    """Sort key: holders of the latest state first, so that a full group does not leave them out."""
    s = worker.status
    return (not s.has_state, -s.committed, worker.node, s.slot or 0)


def _members(workers: list[ObservedWorker]) -> tuple[Member, ...]:
    return tuple(w.as_member() for w in workers)


def furthest_ahead(
    others: Iterable[ObservedWorker], members: Iterable[ObservedWorker], view: GroupView
) -> ObservedWorker | None:
    """The worker of `others` that has the most steps, if these are more than any member has.

    A worker does not count if a group went on without it: it must be in the newest generation that
    trained, or have trained in no earlier generation than the members. None if there is no such
    worker, or no member is known to have the state.
    """
    holders = [w.status for w in members if w.status.has_state]
    held = [s.committed for s in holders]
    trained_in = max((s.trained_in for s in holders), default=0)
    ahead = [
        w
        for w in others
        if w.status.has_state
        and w.status.committed > max(held, default=w.status.committed)
        and (w.status.generation >= view.trained_in or w.status.trained_in >= trained_in > 0)
    ]
    return max(ahead, key=lambda w: w.status.committed, default=None)


def most_steps(workers: Iterable[ObservedWorker]) -> int:
    """The most committed steps of any worker that holds a state; 0 if none does."""
    return max((w.status.committed for w in workers if w.status.has_state), default=0)


def _outgoing(view: GroupView, current: Generation) -> list[ObservedWorker]:
    """Workers that a planned change under way drops, and that may hold steps that no other has."""
    if view.previous_group is None:
        return []
    dropped = sorted(view.previous_group.worker_ids - current.worker_ids)
    known = [view.workers[worker] for worker in dropped if worker in view.workers]
    ahead = _agreed_on(view, current)
    return [
        w
        for w in known
        if may_hold_state(w.status, current)
        and not (w.status.phase is WorkerPhase.READY and w.status.committed <= ahead)
    ]


def _agreed_on(view: GroupView, current: Generation) -> int:
    """The most committed steps of a member in contact that trains in `current`; -1 if none does."""
    members = [view.workers[m.worker] for m in current.members if m.worker in view.workers]
    return max(
        (
            w.status.committed
            for w in members
            if w.out_of_contact_since is None
            and w.status.phase is WorkerPhase.TRAINING
            and w.status.generation == current.number
            and w.status.has_state
        ),
        default=-1,
    )


class _Formed:
    """The decision while a group exists, with a method for each question. It is built each time."""

    def __init__(self, view: GroupView, policy: FormationPolicy, now: float) -> None:
        if view.current is None:
            raise ValueError("there is no group")
        self._view, self._policy, self._now = view, policy, now
        self._current = view.current
        present = [
            view.workers[m.worker] for m in self._current.members if m.worker in view.workers
        ]
        self._lost = len(present) < self._current.world_size
        self._finished: list[ObservedWorker] = []
        self._active: list[ObservedWorker] = []
        self._out_of_contact: list[ObservedWorker] = []
        self._broken: list[ObservedWorker] = []
        for w in present:
            if w.status.phase is WorkerPhase.FINISHED:
                self._finished.append(w)
                continue
            self._active.append(w)
            if w.out_of_contact_since is not None:
                self._out_of_contact.append(w)
            if w.status.broken and w.status.generation == self._current.number:
                self._broken.append(w)
        self._broke_before = (
            broke_before(self._current, view.previous_group, view.workers)
            if view.previous_group
            else []
        )
        self._broken += self._broke_before
        self._outgoing = _outgoing(view, self._current)
        members = self._current.worker_ids
        outside = [w for name, w in view.workers.items() if name not in members]
        self._done = self._finished + [w for w in outside if w.status.phase is WorkerPhase.FINISHED]
        """Finished workers: members, and others whose work the group may know nothing of."""
        self._newcomers = [
            w
            for w in outside
            if w.status.phase is WorkerPhase.READY
            and w.out_of_contact_since is None
            and not w.on_leaving_node
        ]
        self._leaving_holders = [
            w
            for w in outside
            if w.on_leaving_node
            and w.node not in view.released_nodes
            and w.out_of_contact_since is None
            and _takes_part(w, self._newcomers)
        ]
        """Ready workers on leaving nodes that hold the state, which no newcomer has."""
        self._returned = [
            w
            for w in outside
            if w.status.phase in _IN_GROUP and w.status.has_state and w.out_of_contact_since is None
        ]
        """Holders that were left out while out of contact, and do not know that yet."""
        self._coming_out = [
            w
            for w in outside
            if w.status.phase in _IN_GROUP
            and not w.status.has_state
            and w.out_of_contact_since is None
        ]
        """Workers that were joining an earlier group, and may have received the state there."""
        self._admissible = [w for w in self._newcomers if now >= self._held_back_until(w)]

    def _held_back_until(self, w: ObservedWorker) -> float:
        return self._view.held_back.get(w.status.worker, -math.inf)

    def decide(self) -> Decision:
        if not self._active and self._finished:
            return Complete()
        if nothing_left_to_do(self._done, self._active):
            return Complete()
        roll_call_until = self._roll_call_until()
        if self._now < roll_call_until:
            return self._keep_asking(roll_call_until)
        if self._now < (until := self._state_is_away_until()):
            return self._keep_asking(until)
        if self._state_has_come():
            return self._form(self._active, ChangeReason.STARTED)
        dropped = self._lost_dropped_members()
        lost = self._lost or dropped
        if lost or (self._broken and self._finished) or self._is_stranded():
            decision = self._form(self._active, ChangeReason.MEMBER_LOST)
            return replace(decision, dropped=dropped) if isinstance(decision, Form) else decision
        if self._out_of_contact:
            return self._await_contact()
        if self._is_parted():
            return self._part()
        if self._broken:
            return self._mend()
        if self._view.stalled:
            return self._form(self._active, ChangeReason.STALLED)
        if any(not self._has_arrived(w) for w in self._active):
            return self._assemble()
        return self._admit()

    def _state_has_come(self) -> bool:
        """True if the new group has no state and a holder came back while it was being written.
        Once members know of the group they may have begun, and do not go back."""
        if not self._view.unannounced or self._current.leave_after is not None:
            return False
        if self._finished or any(w.status.has_state for w in self._active):
            return False
        here = self._newcomers + self._leaving_holders + self._returned
        return any(w.status.has_state and w.status.committed > 0 for w in here)

    def _has_arrived(self, w: ObservedWorker) -> bool:
        return (
            w.status.phase is WorkerPhase.TRAINING and w.status.generation == self._current.number
        )

    def _lost_dropped_members(self) -> frozenset[WorkerId]:
        """Members that a planned change drops and that were lost before the change. The others may
        wait for them at a call of the script, where no connection shows their death."""
        previous = self._view.previous_group
        if previous is None:
            return frozenset()
        gone = previous.worker_ids - self._view.workers.keys() - self._current.worker_ids
        changes = any(
            self._has_started_to_join(w)  # newcomers start at once
            for w in self._active
            if w.status.worker in previous.worker_ids
        )
        return gone if self._broke_before or not changes else frozenset()

    def _is_stranded(self) -> bool:
        """True if holders of the state join and wait for a member whose script has ended."""
        return any(w.status.generation != self._current.number for w in self._finished) and any(
            w.status.has_state and self._has_started_to_join(w) for w in self._active
        )

    def _roll_call_until(self) -> float:
        """Until when a new leader leaves no worker out, because all need time to find it."""
        gone = [w for w in self._outgoing if w.out_of_contact_since is not None]
        since = [w.out_of_contact_since or 0.0 for w in self._out_of_contact + gone if w.expected]
        return min(since) + self._policy.roll_call_s if since else self._now

    def _state_is_away_until(self) -> float:
        """Until when nobody begins again without the state, because it may be out of contact.

        Once a group has trained, a worker that was joining may have received the state since its
        last report. A group that went on may lose all of its holders: then the others wait for
        those left behind. If no worker is left here, the group is dissolved, and `_gather` waits.
        """
        here = self._active + self._newcomers + self._outgoing
        if any(w.status.has_state and w.out_of_contact_since is None for w in here):
            return self._now
        left_behind = [w for w in self._view.workers.values() if here and w.left_behind]
        there_is_one = self._view.trained_in > 0
        outgoing = [w for w in self._outgoing if w.out_of_contact_since is not None]
        away = [
            w
            for w in self._out_of_contact + left_behind + outgoing
            if may_hold_state(w.status, self._current) and (w.status.has_state or there_is_one)
        ]
        until = [self._place_kept_until(w) for w in away]
        if here and there_is_one:
            until += [self._acknowledge_by(w) for w in self._coming_out]
        return max(until, default=self._now)

    def _place_kept_until(self, w: ObservedWorker) -> float:
        patience_s = return_patience_s(self._policy) if w.expected else self._policy.agent_grace_s
        return (w.out_of_contact_since or 0.0) + patience_s

    def _await_contact(self) -> Decision:
        """Members out of contact train on as long as the group does: their agent may come back.

        If all members are out of contact, the coordinator is cut off or newly elected, unless
        finished members are in contact.
        """
        answered = any(w.out_of_contact_since is None for w in self._finished)
        if len(self._out_of_contact) == len(self._active) and not answered:
            return Wait(reason=WaitReason.OUT_OF_CONTACT)
        arrived = all(self._has_arrived(w) for w in self._active if not w.expected)
        # An agent that restarts has not died with its workers: only a busy machine is slow then.
        stuck = self._view.stuck and not all(w.restarting for w in self._out_of_contact)
        given_up = bool(self._broken) or stuck or self._view.stalled or not arrived
        until = min(map(self._place_kept_until, self._out_of_contact))
        if given_up or self._now >= until:
            return self._form(self._active, ChangeReason.MEMBER_LOST)
        return self._keep_asking(until)

    def _keep_asking(self, until: float) -> Decision:
        """Wait; meanwhile the members in contact are asked whether their group still works."""
        probe_at = self._now + self._policy.probe_interval_s
        return Wait(reason=WaitReason.OUT_OF_CONTACT, until=min(until, probe_at))

    def _form(self, workers: list[ObservedWorker], reason: ChangeReason) -> Form | Complete:
        """Change the group at once. Dissolve it if too few workers are left; complete the job if
        members have finished it and none of these workers is near the end.

        Workers out of contact cannot be told, nor can those that a new agent has not heard from.
        Members that a planned change drops take part once more: only they may have the last step.

        Newcomers do not take part: they join at a step boundary, which members in the middle of
        `session.run` have not reached. There are two exceptions. If no member has the state, none
        is in the middle of anything, and a newcomer that was cut off and has come back may have the
        state. And a newcomer may have the last step, which no remaining member has completed.
        """
        workers = [w for w in workers + self._outgoing if w.out_of_contact_since is None]
        workers = self._with_last_step([w for w in workers if agent_has_heard_from(w)])
        workers = _without_stateless_if_in_run(workers)
        if not any(w.status.has_state for w in workers):
            holders = self._leaving_holders + [w for w in self._returned if agent_has_heard_from(w)]
            everyone = workers + self._newcomers + holders
            workers = sorted(everyone, key=lambda w: (*self._claim(w, reason), *_seniority(w)))
        if nothing_left_to_do(self._done, workers):
            return Complete()
        if not workers or len(workers) + len(self._done) < self._policy.min_workers:
            return Form(members=(), reason=ChangeReason.BELOW_MINIMUM)
        if len(workers) > self._policy.max_workers:  # newcomers can come later
            workers = sorted(workers, key=lambda w: not w.status.has_state)
        return Form(members=_members(workers[: self._policy.max_workers]), reason=reason)

    def _claim(self, w: ObservedWorker, reason: ChangeReason) -> tuple[bool, bool]:
        """Sort key: holders of a state first, then members, which may have received one since their
        last report. Members come last if one of them holds up the others."""
        is_member = w.status.worker in self._current.worker_ids
        held_up = reason in (ChangeReason.STALLED, ChangeReason.JOIN_TIMED_OUT)
        return not w.status.has_state, is_member == held_up

    def _with_last_step(self, workers: list[ObservedWorker]) -> list[ObservedWorker]:
        """Add a worker outside of the group that is ahead of all of these, if there is one: ready
        to join, or back in contact and not yet out of the group that went on without it."""
        returned = [w for w in self._returned if agent_has_heard_from(w)]
        first = furthest_ahead(self._newcomers + returned, workers, self._view)
        return [*workers[: self._policy.max_workers - 1], first] if first is not None else workers

    def _is_parted(self) -> bool:
        """True if the group does not work, and members have no connection to each other. A group
        that only stands still may be slow: then both ends must have found that, or two rounds."""
        view, findings = self._view, self._view.findings
        if findings.asked_at < view.formed_at:
            return False
        if not findings.divide([w.status.worker for w in self._active]):
            return False
        if view.broken_since is not None and findings.asked_at >= view.broken_since:
            # One that has just died refuses connections, too: its agent will say so.
            heard_by = view.broken_since + self._policy.broken_grace_s
            return findings.certain or self._now >= heard_by
        if not findings.certain:
            return False
        stands_still = view.quiet_since is not None and findings.asked_at >= view.quiet_since
        return stands_still or (
            view.assembling_since is not None
            and findings.asked_at >= view.assembling_since
            and any(not self._has_arrived(w) for w in self._active)
        )

    def _part(self) -> Form:
        """Free all members first: only then is it known which of them has the newest state."""
        able = able_to_work(self._active, self._view.findings)
        names = {w.status.worker for w in able}
        enough_left = len(able) + len(self._done) >= self._policy.min_workers
        return Form(
            members=(),
            reason=ChangeReason.GROUP_BROKEN if enough_left else ChangeReason.BELOW_MINIMUM,
            unreachable=frozenset(w.status.worker for w in self._active) - names,
        )

    def _mend(self) -> Decision:
        """A collective broke and no member is known to be dead: form the same group again soon,
        once all have been found to reach each other."""
        if self._now < self._view.probed_by:
            return Wait(reason=WaitReason.LISTENING_FOR_A_DEATH, until=self._view.probed_by)
        if self._view.fruitless_breaks >= self._policy.max_fruitless_breaks:
            return GiveUp(detail=self._broken[0].status.detail)
        since = self._now if self._view.broken_since is None else self._view.broken_since
        until = since + self._policy.broken_grace_s * 2**self._view.fruitless_breaks
        if self._now < until:
            return Wait(reason=WaitReason.LISTENING_FOR_A_DEATH, until=until)
        return self._form(self._active, ChangeReason.GROUP_BROKEN)

    def _assemble(self) -> Decision:
        """Members are joining: wait for them, and leave out those that do not come in time.

        A member that does not even acknowledge the announcement is frozen or cut off. One that does
        may be evaluating between two steps, which it may do for much longer. Before a planned
        change takes effect its members train on, so only the first arrival starts that clock. The
        time of a worker that comes back into contact starts then: it could not learn of anything.
        """
        unaware = [w for w in self._active if w.status.acknowledged < self._current.number]
        if self._current.freezes:
            unaware += [w for w in unfrozen(self._view) if w not in unaware]
        if any(map(self._has_arrived, self._active)):
            unaware = []  # none trains before all have joined: only the reports of these are late
        overdue = [w for w in unaware if self._now >= self._acknowledge_by(w)]
        if overdue:
            return self._leave_out(overdue)
        acknowledge_by = min(map(self._acknowledge_by, unaware), default=None)
        since = self._view.assembling_since
        if since is None:
            return Wait(reason=WaitReason.ASSEMBLING, until=acknowledge_by)
        late = [w for w in self._active if not self._has_started_to_join(w)]
        busy_until = self._busy_until(since)
        if self._now >= busy_until and self._current.leave_after is not None:
            return self._form(self._active, ChangeReason.STALLED)  # one of them holds up the others
        if self._now >= busy_until:
            return self._leave_out(late)
        until = busy_until if acknowledge_by is None else min(acknowledge_by, busy_until)
        return Wait(reason=WaitReason.ASSEMBLING, until=until)

    def _acknowledge_by(self, w: ObservedWorker) -> float:
        return max(self._view.formed_at, w.in_contact_since) + self._policy.join_timeout_s

    def _busy_until(self, since: float) -> float:
        """The instant by which members must start to join.

        A member that stalled a step is not evaluating: it gets no more time than one that does not
        acknowledge. Nor does any member while the job stops and the others can save as many steps:
        they must do so within the grace. If they cannot, they wait for the grace to end, less the
        time that the save needs.
        """
        coming = [w for w in self._active if not self._has_arrived(w)]
        since = max([since, *(w.in_contact_since for w in coming)])
        hurried_until = since + self._policy.join_timeout_s
        stalled = self._current.reason is ChangeReason.STALLED
        if self._current.purpose is not Purpose.SAVE_AND_LEAVE:
            return hurried_until if stalled else _busy_until(self._view, self._policy, since)
        here = [w for w in self._active if self._has_started_to_join(w)]
        if not any(w.status.has_state for w in here):
            return max(hurried_until, self._view.save_by)
        if most_steps(self._active) <= most_steps(here):
            return hurried_until
        return max(hurried_until, self._view.save_by - self._policy.join_timeout_s)

    def _leave_out(self, missing: list[ObservedWorker]) -> Decision:
        names = frozenset(w.status.worker for w in missing)
        rest = [w for w in self._active if w.status.worker not in names]
        decision = self._form(rest, ChangeReason.JOIN_TIMED_OUT)
        if isinstance(decision, Complete):
            return decision
        return replace(decision, left_out=names)

    def _has_started_to_join(self, w: ObservedWorker) -> bool:
        return w.status.phase in _IN_GROUP and w.status.generation == self._current.number

    def _admit(self) -> Decision:
        """The group trains: plan a change for nodes that leave, or for newcomers together."""
        if any(w.on_leaving_node for w in self._active):
            return self._see_off()
        room = self._policy.max_workers - len(self._active)
        if room < 0 and self._current.purpose is Purpose.TRAIN:
            return self._shrink()
        if not self._newcomers or room <= 0:
            return Wait(reason=WaitReason.STEADY)
        if not self._admissible:
            until = min(map(self._held_back_until, self._newcomers))
            return Wait(reason=WaitReason.STEADY, until=until)
        since = self._now if self._view.newcomers_since is None else self._view.newcomers_since
        until = max(
            since + self._policy.join_debounce_s,
            self._view.formed_at + self._policy.planned_interval_s,
        )
        if not self._have_probed(self._admissible):
            until = max(until, self._view.probed_by)
        if self._now < until:
            return Wait(reason=WaitReason.COLLECTING_NEWCOMERS, until=until)
        workers = self._active + sorted(self._admissible, key=_seniority)[:room]
        return Form(members=_members(workers), reason=ChangeReason.MEMBER_JOINED, planned=True)

    def _have_probed(self, newcomers: Iterable[ObservedWorker]) -> bool:
        """True if these and the members have just reached each other, or do not probe."""
        findings, names = self._view.findings, [w.status.worker for w in newcomers]
        return self._policy.probe_s <= 0.0 or (
            self._now < findings.asked_at + FRESH_S
            and findings.admit((w.status.worker for w in self._active), names)
        )

    def _shrink(self) -> Decision:
        """Drop the last ranks: this leader allows fewer members than the previous one did."""
        members = _members(self._active[: self._policy.max_workers])
        return Form(members=members, reason=ChangeReason.MEMBER_LEAVING, planned=True)

    def _see_off(self) -> Decision:
        """Members leave with their nodes, at a step boundary; newcomers take their places.

        While only members that leave hold the state, one of them stays to hand it to newcomers,
        even if there is one member too many then, and no newcomer is held back.
        """
        staying = [w for w in self._active if not w.on_leaving_node]
        hands_over = not any(w.status.has_state for w in staying)
        if hands_over:
            if not self._newcomers:
                return Wait(reason=WaitReason.STEADY)
            staying = [*staying, *(w for w in self._active if w.on_leaving_node)][-1:]
        room = max(int(hands_over), self._policy.max_workers - len(staying))
        coming = self._newcomers if hands_over else self._admissible
        workers = staying + sorted(coming, key=_seniority)[:room]
        enough_left = len(workers) + len(self._finished) >= self._policy.min_workers
        members = _members(workers) if enough_left else ()
        return Form(members=members, reason=ChangeReason.MEMBER_LEAVING, planned=True)


def assign_ranks(
    previous: Sequence[WorkerId], present: Iterable[Member], holders: frozenset[WorkerId]
) -> tuple[Member, ...]:
    """Order `present` into ranks.

    previous: the last group's workers by rank.
    holders: workers that have the job's state; one of them gets rank 0 if there is any.

    Survivors whose old rank still exists keep it. The others fill the gaps: holders first, then
    survivors, then newcomers, in a fixed order, so that equal input gives equal ranks.
    """
    members = {m.worker: m for m in present}
    size = len(members)
    ranks: list[Member | None] = [None] * size
    for rank, worker in enumerate(previous[:size]):
        if worker in members:
            ranks[rank] = members.pop(worker)
    old_rank = {worker: rank for rank, worker in enumerate(previous)}
    rest = sorted(
        members.values(),
        key=lambda m: (m.worker not in holders, old_rank.get(m.worker, size), m.node, m.slot),
    )
    filling = iter(rest)
    dense = [m if m is not None else next(filling) for m in ranks]
    _put_holder_first(dense, holders)
    return tuple(dense)


def _put_holder_first(ranks: list[Member], holders: frozenset[WorkerId]) -> None:
    """Swap a holder into rank 0, which hosts the store and reports for the group."""
    if not ranks or ranks[0].worker in holders:
        return
    for rank, member in enumerate(ranks):
        if member.worker in holders:
            ranks[0], ranks[rank] = member, ranks[0]
            return


def settle(
    planned: Generation, previous: Generation, workers: Mapping[WorkerId, ObservedWorker]
) -> Generation | None:
    """The settled form of `planned`; None while a member of `previous` has not acknowledged it, or
    if there is nothing new to say.

    A member's script counts a step as committed and then looks for news; its link notes the news
    and then reads that count for the acknowledgement. So the script of a member that acknowledges n
    steps may have found no news after step n, and then waits after step n + 1. Once all have
    acknowledged, nobody is past the furthest of these boundaries, and all can be brought to it.

    If a member has left before that boundary, because it has waited too long or the group broke,
    the settled form tells the others to leave at once: they can complete no further step, and where
    scripts meet for a call no connection shows that one will not come. But if the change drops
    members that may be the only ones with the last step, or if all must freeze their groups first,
    an unplanned change follows.
    """
    first = planned.leave_after
    if first is None or any(m.worker not in workers for m in previous.members):
        return None  # they leave at once, or an unplanned change follows
    statuses = [workers[m.worker].status for m in previous.members]
    active = [s for s in statuses if s.phase is not WorkerPhase.FINISHED]
    if broke_before(planned, previous, workers):
        return None
    if any(_left_early(s, planned, previous) for s in active):
        return replace(planned, provisional=False, leave_after=None)
    if not planned.provisional:
        return None
    if any(s.acknowledged < planned.number for s in active):
        return None
    furthest = max((s.committed + 1 for s in active), default=first)
    return replace(planned, provisional=False, leave_after=max(first, furthest))


def broke_before(
    planned: Generation, previous: Generation, workers: Mapping[WorkerId, ObservedWorker]
) -> list[ObservedWorker]:
    """Members that lost the group before the boundary at which a planned change leaves it. Empty
    unless the change drops members, which may have completed a step that no other has.

    If operations queue, members that have left before it in any way, whatever the change, unless
    all have: an unplanned one must follow, for which the others freeze their groups.
    """
    members = [workers[m.worker] for m in previous.members if m.worker in workers]
    if any(w.status.queues for w in members) and not is_left(previous, workers):
        return [w for w in members if _left_early(w.status, planned, previous)]
    if not planned.members or previous.worker_ids <= planned.worker_ids:
        return []
    return [
        w
        for w in members
        if w.status.broken
        and w.status.generation == previous.number
        and not planned.is_due(w.status.committed)
    ]


def _left_early(s: WorkerStatus, planned: Generation, previous: Generation) -> bool:
    """True if a member of `previous` is out of its group before the boundary of `planned`."""
    if s.phase is WorkerPhase.FINISHED or _trains_in(s, previous):
        return False
    return not planned.is_due(s.committed)


def unfrozen(view: GroupView) -> list[ObservedWorker]:
    """The workers in contact that may be in an earlier group, or hold a state, and have not
    acknowledged `view.current`: they may still take garbage for the result of a collective."""
    number = view.current.number if view.current is not None else 0
    return [
        w
        for w in view.workers.values()
        if w.out_of_contact_since is None
        and w.status.acknowledged < number
        and may_hold_state(w.status, view.current)
    ]


def _still_to_freeze(view: GroupView) -> list[ObservedWorker]:
    """The workers that a dissolved group names as frozen, and that are not yet known to be."""
    current = view.current
    if current is None or not current.freezes:
        return []
    named = [view.workers[name] for name in current.frozen if name in view.workers]
    return [w for w in named if w.status.acknowledged < current.number]


def may_abort(view: GroupView, policy: FormationPolicy, now: float) -> bool:
    """True if no worker that may take part in the next group could take what an aborted operation
    sends. Those out of contact may: their states do not count then, so a dissolved group waits for
    them as for others that may come back."""
    current = view.current
    if current is None or not current.freezes or unfrozen(view):
        return False
    if not current.members:
        return now >= _others_return_until(view, policy) and not _still_to_freeze(view)
    members = [view.workers.get(m.worker) for m in current.members]
    return all(w is not None and w.out_of_contact_since is None for w in members)


def in_place(planned: Generation, workers: Mapping[WorkerId, ObservedWorker]) -> bool:
    """True if all members have agreed on a state in `planned`: the old group is of no use."""
    return not planned.provisional and all(
        m.worker in workers
        and workers[m.worker].status.generation == planned.number
        and workers[m.worker].status.phase in (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
        for m in planned.members
    )


def is_left(previous: Generation, workers: Mapping[WorkerId, ObservedWorker]) -> bool:
    """True if no member trains any more in the group that a planned change ends."""
    return not any(_trains_in(w.status, previous) for w in workers.values())


def counts_steps(reported: int, current: Generation | None, *, none_left_yet: bool) -> bool:
    """True if steps that are reported of the generation `reported` count: those of `current`, and
    during a planned change those of the group before it, while no member has left that one yet."""
    if current is None:
        return False
    return reported == current.number or (current.leave_after is not None and none_left_yet)


def _trains_in(s: WorkerStatus, generation: Generation) -> bool:
    return s.phase is WorkerPhase.TRAINING and s.generation == generation.number


@dataclass(slots=True)
class Clocks:
    """When conditions of the view began to hold; None for a condition that does not hold."""

    no_group: float | None = None
    enough: float | None = None
    broken: float | None = None
    newcomers: float | None = None
    assembling: float | None = None
    slow_until: float = -math.inf
    """Until when `is_slow` was true the last time."""
    is_slow: bool = False
    """A member compiles, or the group is in its first step."""

    def update(
        self,
        current: Generation | None,
        workers: Mapping[WorkerId, ObservedWorker],
        policy: FormationPolicy,
        now: float,
        *,
        previous: Generation | None = None,
        first_step: bool = False,
    ) -> None:
        """Start or stop each clock by what is known now.

        previous: the group that trains until `current`, a planned change, is in place. A member
        that has left it starts the clock `assembling`: the others can complete no further step.
        first_step: the group is in its first step.
        """
        number = current.number if current else 0
        members = current.worker_ids if current else frozenset()
        before = previous.number if previous else 0
        broken = newcomers = arrived = compiles = False
        for name, w in workers.items():
            status = w.status
            if status.phase is WorkerPhase.READY and name not in members:
                newcomers = True
            if before and status.generation == before and status.phase is WorkerPhase.READY:
                arrived = True
            if status.compiling is not None and status.has_state:
                compiles = True
            if status.generation == number:
                if status.broken and name in members:
                    broken = True
                if status.phase in _IN_GROUP:
                    arrived = True
        if current is not None and previous is not None:
            broken = broken or bool(broke_before(current, previous, workers))
        can_form = not members and enough(workers, policy)
        self.no_group = _start_or_stop(self.no_group, not members, now)
        self.enough = _start_or_stop(self.enough, can_form, now)
        self.broken = _start_or_stop(self.broken, broken, now)
        self.newcomers = _start_or_stop(self.newcomers, newcomers, now)
        if compiles or first_step or self.is_slow:
            self.slow_until = now
        self.is_slow = compiles or first_step
        if self.assembling is None and arrived:
            self.assembling = now


def _start_or_stop(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
