"""One decision: given everything known now, should the group change, and into what?

Level-triggered: the whole view goes in at every change and the decision is taken anew, so a
report that was missed costs nothing. No effects and no memory; the machine owns both. Below it
stands what the decision becomes: who gets which rank, at which step boundary the group is left for
a planned change, and since when the conditions hold that the decision is patient with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.coordinator.decisions import Complete, Decision, Form, GiveUp, Wait, WaitReason
from elastic.core.coordinator.view import (
    FormationPolicy,
    GroupView,
    ObservedWorker,
    enough,
    has_heir,
    is_in_sight,
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
    """What should happen to the group now."""
    if policy.restart_all:
        return decide_whole(view, policy, now)
    if view.current is None or not view.current.members:
        return _gather(view, policy, now)
    return _Formed(view, policy, now).decide()


def _gather(view: GroupView, policy: FormationPolicy, now: float) -> Decision:
    """Without a group: start when everybody who can come is ready, or patience has run out.

    Members that were in the middle of `session.run` finish that first, among themselves, even if
    they are too few to train: a newcomer cannot take part in it.
    """
    if view.adopted_at is not None:
        until = view.adopted_at + return_patience_s(policy)
        if now < until:  # holders of the state may not have come back yet
            return Wait(reason=WaitReason.ASSEMBLING, until=until)
    silent = worth_waiting_for(view.workers)
    until = max((w.silent_since or 0.0 for w in silent), default=now) + policy.agent_grace_s
    if silent and now < until:  # the same for workers that have lost their agent
        return Wait(reason=WaitReason.ASSEMBLING, until=until)
    in_contact = {name: w for name, w in view.workers.items() if w.silent_since is None}
    if len(in_contact) < len(view.workers):
        view = replace(view, workers=in_contact)
    staying = [w for w in view.workers.values() if not w.leaving]
    ready = [w for w in view.workers.values() if _takes_part(w, staying)]
    finished = [w for w in view.workers.values() if w.status.phase is WorkerPhase.FINISHED]
    coming = [w for w in staying if w.status.phase in _COMING]
    returning = [w for w in view.workers.values() if w.status.phase in _IN_GROUP]
    if finished and not ready and not coming and not returning:
        return Complete()
    if _nothing_left_to_do(finished, ready + returning):
        return Complete()
    if returning:
        return _await_return(view, policy, now, returning)
    if any(map(_repeats, ready)):
        chosen = sorted(_at_one_place(ready), key=_seniority)[: policy.max_workers]
        return Form(members=_members(chosen), reason=ChangeReason.STARTED)
    if not enough(view.workers, policy):
        return Wait(reason=WaitReason.BELOW_MINIMUM)
    expected = min(view.slots - len(finished), policy.max_workers)
    if sum(not w.leaving for w in ready) < expected:
        since = now if view.enough_since is None else view.enough_since
        deadline = since + policy.gather_timeout_s
        if now < deadline:
            return Wait(reason=WaitReason.GATHERING, until=deadline)
    chosen = sorted(ready, key=_seniority)[: policy.max_workers]
    return Form(members=_members(chosen), reason=ChangeReason.STARTED)


def _takes_part(w: ObservedWorker, staying: list[ObservedWorker]) -> bool:
    """It is ready and stays, or it hands over the state that only it has."""
    s = w.status
    hands_over = s.has_state and not has_heir(s, [other.status for other in staying])
    return s.phase is WorkerPhase.READY and (hands_over or not w.leaving)


def _at_one_place(workers: list[ObservedWorker]) -> list[ObservedWorker]:
    """Without those that lack the state, if one that has it is in the middle of `session.run`: a
    script that has not come to that call cannot take part in it."""
    return [w for w in workers if w.status.has_state] if any(map(_repeats, workers)) else workers


def _repeats(w: ObservedWorker) -> bool:
    """It is inside a call of `session.run`, with the state that belongs to it."""
    return w.status.has_state and w.status.in_run


def _nothing_left_to_do(finished: list[ObservedWorker], others: list[ObservedWorker]) -> bool:
    """Members have taken the job to its end. The others would repeat more than its last step, which
    the job may have lost with them; or they hold a state that it has gone back from since."""
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
    """Members of a dissolved group hold the state: nobody trains without them while they may come.

    Without any generation known, by a new leader, they are training: a second group must not.
    A worker that comes back has not heard of the end of its group meanwhile.
    """
    if view.current is None:
        return Wait(reason=WaitReason.STEADY)
    leaving = view.leaving
    if leaving is not None and not leaving.worker_ids <= view.workers.keys():
        # The others may wait for it at a call, where no connection tells them of a death.
        return Form(members=(), reason=ChangeReason.MEMBER_LOST)
    since = max(view.formed_at, *(w.in_contact_since for w in returning))
    until = _busy_until(view, policy, since)
    if now < until:
        return Wait(reason=WaitReason.ASSEMBLING, until=until)
    if view.current.leave_after is not None:  # one of them may hold up the rest
        return Form(members=(), reason=ChangeReason.STALLED)
    names = frozenset(w.status.worker for w in returning)
    return Form(members=(), reason=ChangeReason.JOIN_TIMED_OUT, left_out=names)


def _busy_until(view: GroupView, policy: FormationPolicy, since: float) -> float:
    """How long members may take to come to a step boundary: those that are in a slow step, and
    those that wait for them in it, longer."""
    if view.slow:
        return since + max(policy.busy_timeout_s, policy.first_step_s)
    return max(since, view.slow_at) + policy.busy_timeout_s


def _seniority(worker: ObservedWorker) -> tuple[bool, int, NodeId, int]:
    """Holders of the latest state first: they must not be left out for want of room."""
    s = worker.status
    return (not s.has_state, -s.committed, worker.node, s.slot or 0)


def _members(workers: list[ObservedWorker]) -> tuple[Member, ...]:
    return tuple(w.as_member() for w in workers)


def furthest_ahead(
    others: Iterable[ObservedWorker], members: Iterable[ObservedWorker], view: GroupView
) -> ObservedWorker | None:
    """The one of `others` with more steps than any of the members has, unless a group went on
    without it: one that trained later than the members did. None: there is no such one, or no
    member is known to have the state."""
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
    """Committed steps of the furthest of those that hold a state."""
    return max((w.status.committed for w in workers if w.status.has_state), default=0)


def _outgoing(view: GroupView, current: Generation) -> list[ObservedWorker]:
    """Workers that a planned change drops, not in place yet, that may hold what no other does."""
    if view.leaving is None:
        return []
    dropped = sorted(view.leaving.worker_ids - current.worker_ids)
    known = [view.workers[worker] for worker in dropped if worker in view.workers]
    ahead = _agreed_on(view, current)
    return [
        w
        for w in known
        if may_hold_state(w.status, current)
        and not (w.status.phase is WorkerPhase.READY and w.status.committed <= ahead)
    ]


def _agreed_on(view: GroupView, current: Generation) -> int:
    """Committed steps that a member in contact has from the present group; -1 if none has yet."""
    members = [view.workers[m.worker] for m in current.members if m.worker in view.workers]
    return max(
        (
            w.status.committed
            for w in members
            if w.silent_since is None
            and w.status.phase is WorkerPhase.TRAINING
            and w.status.generation == current.number
            and w.status.has_state
        ),
        default=-1,
    )


class _Formed:
    """The decision while a group exists, split by question; built anew each time."""

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
        self._silent: list[ObservedWorker] = []
        self._broken: list[ObservedWorker] = []
        for w in present:
            if w.status.phase is WorkerPhase.FINISHED:
                self._finished.append(w)
                continue
            self._active.append(w)
            if w.silent_since is not None:
                self._silent.append(w)
            if w.status.broken and w.status.generation == self._current.number:
                self._broken.append(w)
        self._broke_before = (
            broke_before(self._current, view.leaving, view.workers) if view.leaving else []
        )
        self._broken += self._broke_before
        self._outgoing = _outgoing(view, self._current)
        members = self._current.worker_ids
        outside = [w for name, w in view.workers.items() if name not in members]
        self._done = self._finished + [w for w in outside if w.status.phase is WorkerPhase.FINISHED]
        """Finished workers, and those that came back to a group that knows nothing of the work."""
        self._newcomers = [
            w
            for w in outside
            if w.status.phase is WorkerPhase.READY and w.silent_since is None and not w.leaving
        ]
        self._bequeathing = [
            w
            for w in outside
            if w.leaving
            and w.node not in view.let_go
            and w.silent_since is None
            and _takes_part(w, self._newcomers)
        ]
        """Workers that leave, with the state that no newcomer has."""
        self._returned = [
            w
            for w in outside
            if w.status.phase in _IN_GROUP and w.status.has_state and w.silent_since is None
        ]
        """Holders that were left out while out of contact, and have not heard of it yet."""
        self._coming_out = [
            w
            for w in outside
            if w.status.phase in _IN_GROUP and not w.status.has_state and w.silent_since is None
        ]
        """Were on their way into an earlier group, and may have got the state there."""
        self._admissible = [w for w in self._newcomers if now >= self._held_back_until(w)]

    def _held_back_until(self, w: ObservedWorker) -> float:
        return self._view.held_back.get(w.status.worker, -math.inf)

    def decide(self) -> Decision:
        if not self._active and self._finished:
            return Complete()
        if _nothing_left_to_do(self._done, self._active):
            return Complete()
        roll_call_until = self._roll_call_until()
        if self._now < roll_call_until:
            return self._keep_asking(roll_call_until)
        if self._now < (until := self._state_is_away_until()):
            return self._keep_asking(until)
        if self._state_has_come():
            return self._form(self._active, ChangeReason.STARTED)
        lost = self._lost or self._has_lost_who_leaves()
        if lost or (self._broken and self._finished) or self._is_stranded():
            return self._form(self._active, ChangeReason.MEMBER_LOST)
        if self._silent:
            return self._await_silent()
        if self._broken:
            return self._mend()
        if self._view.stalled:
            return self._form(self._active, ChangeReason.STALLED)
        if any(not self._has_arrived(w) for w in self._active):
            return self._assemble()
        return self._admit()

    def _state_has_come(self) -> bool:
        """The new group has no state, and a holder of it has come back while the group was
        being written. Once members were told they may have begun: then they do not go back."""
        if not self._view.untold or self._current.leave_after is not None:
            return False
        if self._finished or any(w.status.has_state for w in self._active):
            return False
        here = self._newcomers + self._bequeathing + self._returned
        return any(w.status.has_state and w.status.committed > 0 for w in here)

    def _has_arrived(self, w: ObservedWorker) -> bool:
        return (
            w.status.phase is WorkerPhase.TRAINING and w.status.generation == self._current.number
        )

    def _has_lost_who_leaves(self) -> bool:
        """A member that a planned change drops is gone before that: the others may wait for it at
        a call of the script, where no connection tells them of a death."""
        leaving = self._view.leaving
        return (
            leaving is not None
            and not leaving.worker_ids <= self._view.workers.keys() | self._current.worker_ids
            and (
                bool(self._broke_before)
                or not any(
                    self._has_started_to_join(w)  # newcomers do so at once
                    for w in self._active
                    if w.status.worker in leaving.worker_ids
                )
            )
        )

    def _is_stranded(self) -> bool:
        """Holders of the state wait here for a member that needs no group any more."""
        return any(w.status.generation != self._current.number for w in self._finished) and any(
            w.status.has_state and self._has_started_to_join(w) for w in self._active
        )

    def _roll_call_until(self) -> float:
        """A new leader leaves no worker out before all have had the time to find it."""
        gone = [w for w in self._outgoing if w.silent_since is not None]
        since = [w.silent_since or 0.0 for w in self._silent + gone if w.expected]
        return min(since) + self._policy.roll_call_s if since else self._now

    def _state_is_away_until(self) -> float:
        """While only members out of contact hold the state, nobody begins again without them.

        Once there is a state, one that was on its way in may have got it since its last report. A
        group that went on may lose all its holders: then the others wait for those left behind. If
        no worker is left here, the group is dissolved, and `_gather` waits.
        """
        here = self._active + self._newcomers + self._outgoing
        if any(w.status.has_state and w.silent_since is None for w in here):
            return self._now
        left_behind = [w for w in self._view.workers.values() if here and w.left_behind]
        there_is_one = self._view.trained_in > 0
        outgoing = [w for w in self._outgoing if w.silent_since is not None]
        away = [
            w
            for w in self._silent + left_behind + outgoing
            if may_hold_state(w.status, self._current) and (w.status.has_state or there_is_one)
        ]
        until = [self._place_kept_until(w) for w in away]
        if here and there_is_one:
            until += [self._deaf_from(w) for w in self._coming_out]
        return max(until, default=self._now)

    def _place_kept_until(self, w: ObservedWorker) -> float:
        patience_s = return_patience_s(self._policy) if w.expected else self._policy.agent_grace_s
        return (w.silent_since or 0.0) + patience_s

    def _await_silent(self) -> Decision:
        """Members out of contact train on as long as the group does: their agent may come back.

        If all are, it is the coordinator that is cut off, or newly elected; unless those that have
        finished are in contact.
        """
        answered = any(w.silent_since is None for w in self._finished)
        if len(self._silent) == len(self._active) and not answered:
            return Wait(reason=WaitReason.OUT_OF_CONTACT)
        arrived = all(self._has_arrived(w) for w in self._active if not w.expected)
        given_up = bool(self._broken) or self._view.stuck or self._view.stalled or not arrived
        until = min(map(self._place_kept_until, self._silent))
        if given_up or self._now >= until:
            return self._form(self._active, ChangeReason.MEMBER_LOST)
        return self._keep_asking(until)

    def _keep_asking(self, until: float) -> Decision:
        """Members in contact are asked meanwhile whether their group still works."""
        probe_at = self._now + self._policy.probe_interval_s
        return Wait(reason=WaitReason.OUT_OF_CONTACT, until=min(until, probe_at))

    def _form(self, workers: list[ObservedWorker], reason: ChangeReason) -> Form | Complete:
        """An unplanned change, now; or nobody trains, while too few are left. Where members have
        come to the end, and those that it would take along have not got near it, the job is done.

        Members out of contact cannot be told, nor those that a new agent has not heard of. Those
        that leave take part once more: only they may have got to the end of the last step.

        Newcomers are not asked: they join at a step boundary, which members that are in the
        middle of `session.run` have not reached. Members without the state are in the middle of
        nothing, and one of the newcomers may hold the state: it was cut off and has come back. Or
        it may have the last step, which none of the members completed that are left.
        """
        workers = [w for w in workers + self._outgoing if w.silent_since is None]
        workers = self._with_last_step([w for w in workers if is_in_sight(w)])
        workers = _at_one_place(workers)
        if not any(w.status.has_state for w in workers):
            holders = self._bequeathing + [w for w in self._returned if is_in_sight(w)]
            everyone = workers + self._newcomers + holders
            workers = sorted(everyone, key=lambda w: (*self._claim(w, reason), *_seniority(w)))
        if _nothing_left_to_do(self._done, workers):
            return Complete()
        if not workers or len(workers) + len(self._done) < self._policy.min_workers:
            return Form(members=(), reason=ChangeReason.BELOW_MINIMUM)
        if len(workers) > self._policy.max_workers:  # newcomers can come later
            workers = sorted(workers, key=lambda w: not w.status.has_state)
        return Form(members=_members(workers[: self._policy.max_workers]), reason=reason)

    def _claim(self, w: ObservedWorker, reason: ChangeReason) -> tuple[bool, bool]:
        """Holders of a state first. Then members, which may have come to hold one since they were
        last heard; unless one of them holds up the rest."""
        is_member = w.status.worker in self._current.worker_ids
        held_up = reason in (ChangeReason.STALLED, ChangeReason.JOIN_TIMED_OUT)
        return not w.status.has_state, is_member == held_up

    def _with_last_step(self, workers: list[ObservedWorker]) -> list[ObservedWorker]:
        """Add one outside of the group that is ahead of all of them: ready to join, or back in
        contact and still in the group that went on without it."""
        returned = [w for w in self._returned if is_in_sight(w)]
        first = furthest_ahead(self._newcomers + returned, workers, self._view)
        return [*workers[: self._policy.max_workers - 1], first] if first is not None else workers

    def _mend(self) -> Decision:
        """A broken collective and nobody known to be dead: the same members again, soon."""
        if self._view.fruitless_breaks >= self._policy.max_fruitless_breaks:
            return GiveUp(detail=self._broken[0].status.detail)
        since = self._now if self._view.broken_since is None else self._view.broken_since
        until = since + self._policy.broken_grace_s * 2**self._view.fruitless_breaks
        if self._now < until:
            return Wait(reason=WaitReason.LISTENING_FOR_A_DEATH, until=until)
        return self._form(self._active, ChangeReason.GROUP_BROKEN)

    def _assemble(self) -> Decision:
        """Members are on their way in; those that never come are left out.

        A member that does not even acknowledge the announcement is frozen or cut off. One that
        does may be evaluating between two steps, which is its right for much longer. Before a
        planned change takes effect its members train on, so only the first arrival starts that
        clock. A worker that comes back has not heard of anything meanwhile.
        """
        unaware = [w for w in self._active if w.status.acknowledged < self._current.number]
        if any(map(self._has_arrived, self._active)):
            unaware = []  # it takes all of them to come to one state: only their reports are late
        deaf = [w for w in unaware if self._now >= self._deaf_from(w)]
        if deaf:
            return self._leave_out(deaf)
        deaf_until = min(map(self._deaf_from, unaware), default=None)
        since = self._view.assembling_since
        if since is None:
            return Wait(reason=WaitReason.ASSEMBLING, until=deaf_until)
        late = [w for w in self._active if not self._has_started_to_join(w)]
        busy_until = self._busy_until(since)
        if self._now >= busy_until and self._current.leave_after is not None:
            return self._form(self._active, ChangeReason.STALLED)  # one of them holds up the rest
        if self._now >= busy_until:
            return self._leave_out(late)
        until = busy_until if deaf_until is None else min(deaf_until, busy_until)
        return Wait(reason=WaitReason.ASSEMBLING, until=until)

    def _deaf_from(self, w: ObservedWorker) -> float:
        return max(self._view.formed_at, w.in_contact_since) + self._policy.join_timeout_s

    def _busy_until(self, since: float) -> float:
        """A member that stalled a step is not evaluating: it gets no more time than a deaf one.

        Nor does anyone while the job stops and others can save as much: they must do so within the
        grace. Where no other has as much, the grace is there to wait, but for what saving takes.
        """
        coming = [w for w in self._active if not self._has_arrived(w)]
        since = max([since, *(w.in_contact_since for w in coming)])
        hurried_until = since + self._policy.join_timeout_s
        if self._current.reason is ChangeReason.STALLED:
            return hurried_until
        if self._current.purpose is not Purpose.SAVE_AND_LEAVE:
            return _busy_until(self._view, self._policy, since)
        here = [w for w in self._active if self._has_started_to_join(w)]
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
        """The group runs: newcomers join by a planned change, several at once if they can."""
        if any(w.leaving for w in self._active):
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
        if self._now < until:
            return Wait(reason=WaitReason.COLLECTING_NEWCOMERS, until=until)
        workers = self._active + sorted(self._admissible, key=_seniority)[:room]
        return Form(members=_members(workers), reason=ChangeReason.MEMBER_JOINED, planned=True)

    def _shrink(self) -> Decision:
        """A leader allows fewer members than the one before: the last ranks wait from then on."""
        members = _members(self._active[: self._policy.max_workers])
        return Form(members=members, reason=ChangeReason.MEMBER_LEAVING, planned=True)

    def _see_off(self) -> Decision:
        """Members leave with their nodes, at a step boundary; newcomers take their places.

        While only those that leave hold the state, one of them stays for newcomers to get it, if
        need be one more than there may be members, and no newcomer is held back.
        """
        staying = [w for w in self._active if not w.leaving]
        hands_over = not any(w.status.has_state for w in staying)
        if hands_over:
            if not self._newcomers:
                return Wait(reason=WaitReason.STEADY)
            staying = [*staying, *(w for w in self._active if w.leaving)][-1:]
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

    Survivors whose old rank still exists keep it; the others and the newcomers fill the gaps,
    survivors first, each in a fixed order, so that equal input gives equal ranks.
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
    """Rank 0 hosts the store and reports for the group: not a task for a newcomer."""
    if not ranks or ranks[0].worker in holders:
        return
    for rank, member in enumerate(ranks):
        if member.worker in holders:
            ranks[0], ranks[rank] = member, ranks[0]
            return


def settle(
    planned: Generation, leaving: Generation, workers: Mapping[WorkerId, ObservedWorker]
) -> Generation | None:
    """The settled form of `planned`; None while a member of `leaving` has not heard of it, or
    there is nothing new to say.

    A member's script counts a step as committed and then looks for news; its link notes the news
    and then reads that count for the acknowledgement. So one that acknowledges n steps can have
    looked in vain after step n, and waits after step n + 1. Once all have acknowledged, nobody is
    past the furthest of these boundaries, and all can be brought to it.

    Unless one has left before it, because it has waited too long or the group broke. Then the
    others are to leave at once: they can complete no further step, and where scripts meet for a
    call no connection tells them that one will not come. Where others go on without members that
    may be the only ones that have completed the last step, an unplanned change follows.
    """
    first = planned.leave_after
    if first is None or any(m.worker not in workers for m in leaving.members):
        return None  # they leave at once, or an unplanned change follows
    statuses = [workers[m.worker].status for m in leaving.members]
    active = [s for s in statuses if s.phase is not WorkerPhase.FINISHED]
    if broke_before(planned, leaving, workers):
        return None
    left = [s for s in active if not _trains_in(s, leaving)]
    if any(planned.provisional or s.committed < first for s in left):
        return replace(planned, provisional=False, leave_after=None)
    if not planned.provisional:
        return None
    if any(s.acknowledged < planned.number for s in active):
        return None
    furthest = max((s.committed + 1 for s in active), default=first)
    return replace(planned, provisional=False, leave_after=max(first, furthest))


def broke_before(
    planned: Generation, leaving: Generation, workers: Mapping[WorkerId, ObservedWorker]
) -> list[ObservedWorker]:
    """Members that lost the group before the boundary at which it is left, if others are to go on
    without some: these may have completed a step that no other has."""
    if not planned.members or leaving.worker_ids <= planned.worker_ids:
        return []
    members = [workers[m.worker] for m in leaving.members if m.worker in workers]
    return [
        w
        for w in members
        if w.status.broken
        and w.status.generation == leaving.number
        and not planned.is_due(w.status.committed)
    ]


def in_place(planned: Generation, workers: Mapping[WorkerId, ObservedWorker]) -> bool:
    """All its members have agreed on what they go on from: the group before is of no use."""
    return not planned.provisional and all(
        m.worker in workers
        and workers[m.worker].status.generation == planned.number
        and workers[m.worker].status.phase in (WorkerPhase.TRAINING, WorkerPhase.FINISHED)
        for m in planned.members
    )


def is_left(leaving: Generation, workers: Mapping[WorkerId, ObservedWorker]) -> bool:
    """No member trains any more in the group that a planned change ends."""
    return not any(_trains_in(w.status, leaving) for w in workers.values())


def counts_steps(reported: int, current: Generation | None, *, leaving: bool) -> bool:
    """Is the generation `reported` the one that makes progress? While members have yet to leave
    the group before a planned change, that one is."""
    if current is None:
        return False
    return reported == current.number or (current.leave_after is not None and leaving)


def _trains_in(s: WorkerStatus, generation: Generation) -> bool:
    return s.phase is WorkerPhase.TRAINING and s.generation == generation.number


@dataclass(slots=True)
class Clocks:
    """Instants at which conditions of the view began to hold; None where one does not."""

    enough: float | None = None
    broken: float | None = None
    newcomers: float | None = None
    assembling: float | None = None
    slow: float = -math.inf
    """Until when the step under way was a slow one."""
    is_slow: bool = False

    def update(
        self,
        current: Generation | None,
        workers: Mapping[WorkerId, ObservedWorker],
        policy: FormationPolicy,
        now: float,
        *,
        leaving: Generation | None = None,
        first_step: bool = False,
    ) -> None:
        """Start or stop each clock by what is known now.

        leaving: the group that trains until `current`, a planned change, is in place. A member that
        has left it is not awaited, but without it the others can complete no further step.
        first_step: the group is in its first.
        """
        number = current.number if current else 0
        members = current.worker_ids if current else frozenset()
        before = leaving.number if leaving else 0
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
        if current is not None and leaving is not None:
            broken = broken or bool(broke_before(current, leaving, workers))
        can_form = not members and enough(workers, policy)
        self.enough = _start_or_stop(self.enough, can_form, now)
        self.broken = _start_or_stop(self.broken, broken, now)
        self.newcomers = _start_or_stop(self.newcomers, newcomers, now)
        if compiles or first_step or self.is_slow:
            self.slow = now
        self.is_slow = compiles or first_step
        if self.assembling is None and arrived:
            self.assembling = now


def _start_or_stop(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
