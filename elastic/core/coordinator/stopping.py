"""One decision while the job stops: who saves, and from when on there is nobody to wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.coordinator.decisions import Decision, End, Form, Wait, WaitReason
from elastic.core.coordinator.formation import decide
from elastic.core.coordinator.view import (
    FormationPolicy,
    GroupView,
    Sighting,
    return_patience_s,
)
from elastic.core.coordinator.whole_restart import stop_whole
from elastic.core.membership import ChangeReason, Generation, Purpose, WorkerPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The job is to be left."""

    exit_code: int
    reason: str
    deadline: float
    """Whoever has not saved by then is not waited for."""


def decide_stop(view: GroupView, policy: FormationPolicy, stop: Stop, now: float) -> Decision | End:
    """What should happen to the group now that the job stops."""
    if policy.restart_all:
        return stop_whole(view, stop.deadline, now)
    current = view.current
    grouped = current is not None and len(current.members) > 0
    holders = [w for w in view.workers.values() if _holds_unsaved(w)]
    if now >= stop.deadline:
        return End(in_time=not grouped and not holders)
    if current is None or not grouped:
        return _gather_to_save(view, policy, holders, now) if holders else End(in_time=True)
    members = {name: w for name, w in view.workers.items() if name in current.worker_ids}
    since = [w.silent_since for w in members.values() if w.expected and w.silent_since is not None]
    if since and now < (until := min(since) + return_patience_s(policy)):
        return Wait(reason=WaitReason.OUT_OF_CONTACT, until=until)
    if current.purpose is Purpose.TRAIN and any(not _finished(w) for w in members.values()):
        return _leave(current, [w for w in members.values() if not _finished(w)])
    # Nobody else is admitted any more, and any number of survivors can save.
    return decide(replace(view, workers=members), replace(policy, min_workers=1), now)


def _finished(w: Sighting) -> bool:
    return w.status.phase is WorkerPhase.FINISHED


def _holds_unsaved(w: Sighting) -> bool:
    return w.status.took_part and not _finished(w)


def _leave(current: Generation, active: list[Sighting]) -> Form:
    """At a step boundary if the group trains; one that only assembles has none to wait for."""
    trains = all(
        w.status.phase is WorkerPhase.TRAINING and w.status.generation == current.number
        for w in active
    )
    members = tuple(w.as_member() for w in active)
    return Form(members=members, reason=ChangeReason.STOPPING, planned=trains)


def _gather_to_save(
    view: GroupView, policy: FormationPolicy, holders: list[Sighting], now: float
) -> Decision:
    """Nobody trains, but survivors hold in memory what is not saved; newcomers hold nothing."""
    ready = [w for w in holders if w.status.phase is WorkerPhase.READY]
    patient_until = view.formed_at + policy.join_timeout_s
    if ready and (len(ready) == len(holders) or now >= patient_until):
        return Form(members=tuple(w.as_member() for w in ready), reason=ChangeReason.STOPPING)
    return Wait(reason=WaitReason.ASSEMBLING, until=patient_until if now < patient_until else None)
