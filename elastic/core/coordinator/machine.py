"""The coordinator's memory: takes an event, asks `decide`, returns effects."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.checkpoints import CheckpointTracker
from elastic.core.coordinator.formation import (
    Complete,
    Decision,
    Form,
    FormationPolicy,
    GiveUp,
    GroupView,
    Sighting,
    Wait,
    WaitReason,
    decide,
    enough,
)
from elastic.core.coordinator.phases import TERMINAL, TRANSITIONS, JobPhase
from elastic.core.coordinator.progress import ProgressWatch, StallPolicy
from elastic.core.coordinator.stopping import End, Stop, decide_stop
from elastic.core.invariants import check_succession, require
from elastic.core.membership import (
    ChangeReason,
    FailureKind,
    Generation,
    NodeId,
    Purpose,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)
from elastic.core.ranks import assign_ranks
from elastic.core.restarts import RestartPolicy, Verdict

_REMEMBERED_GENERATIONS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """What the machine needs of the job's settings."""

    incarnation: str
    formation: FormationPolicy = field(default_factory=FormationPolicy)
    stall: StallPolicy = field(default_factory=StallPolicy)
    max_restarts: int = 100
    restart_window_s: float = 3600.0
    planned_notice_s: float = 0.35
    """A planned change takes effect at the first step expected to end later than this: longer
    than a report of progress is old plus the way of the news."""
    stop_grace_s: float = 30.0


@dataclass(slots=True)
class _Node:
    slots: int = 0
    workers: dict[WorkerId, WorkerStatus] = field(default_factory=dict)
    gone: set[WorkerId] = field(default_factory=set)
    """Failed, and not yet missing from the node's view; a name may come back after a restart."""


@dataclass(slots=True)
class _Since:
    """Instants at which conditions of the view began to hold."""

    enough: float | None = None
    broken: float | None = None
    newcomers: float | None = None
    assembling: float | None = None


class Coordinator:
    """One job's coordinator. `handle` is the only way in, its result the only way out."""

    def __init__(self, settings: CoordinatorSettings, *, last_generation: int = 0) -> None:
        self._settings = settings
        self._number = last_generation
        self._nodes: dict[NodeId, _Node] = {}
        self._generations: dict[int, Generation] = {}
        self._current: Generation | None = None
        self._persisting: Generation | None = None
        self._formed_at = 0.0
        self._since = _Since()
        self._breaks_at_step: tuple[int, int] = (0, -1)
        self._restarts = RestartPolicy(settings.max_restarts, settings.restart_window_s)
        self._checkpoints = CheckpointTracker()
        self._progress = ProgressWatch(settings.stall)
        self._stop: Stop | None = None
        self._waiting = WaitReason.BELOW_MINIMUM
        self.phase = JobPhase.GATHERING

    # ---- what others may read

    @property
    def current(self) -> Generation | None:
        """The newest generation that exists."""
        return self._current

    @property
    def committed(self) -> int:
        """Steps committed, as far as reported."""
        return self._progress.committed

    @property
    def waiting_for(self) -> WaitReason:
        """Why the group stays as it is."""
        return self._waiting

    def restarts_spent(self, now: float) -> int:
        """Restarts counted against the budget at `now`."""
        return self._restarts.spent(now)

    def generation(self, number: int) -> Generation | None:
        """A generation that is not long past."""
        return self._generations.get(number)

    # ---- the way in

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Take one event; return what is to be done, in order. `now`: monotonic seconds."""
        if self.phase in TERMINAL:
            return []
        effects = self._apply(event, now)
        if self.phase not in TERMINAL:
            effects += self._consider(now)
        return effects

    @functools.singledispatchmethod
    def _apply(self, event: Any, now: float) -> list[fx.Effect]:
        raise TypeError(f"not an event of the coordinator: {event!r} at {now}")

    @_apply.register
    def _(self, event: ev.NodeReported, now: float) -> list[fx.Effect]:
        node = self._nodes.setdefault(event.node, _Node())
        before = node.workers
        node.slots = event.slots
        node.gone.intersection_update(s.worker for s in event.workers)
        node.workers = {s.worker: s for s in event.workers if s.worker not in node.gone}
        for status in node.workers.values():
            if status.took_part:
                self._progress.advance(status.committed, now)
        return self._note_lost(set(before) - set(node.workers), now)

    @_apply.register
    def _(self, event: ev.NodeLost, now: float) -> list[fx.Effect]:
        node = self._nodes.pop(event.node, _Node())
        return self._note_lost(set(node.workers), now)

    @_apply.register
    def _(self, event: ev.WorkerFailed, now: float) -> list[fx.Effect]:
        running = frozenset(w for n in self._nodes.values() for w in n.workers)
        worker = event.failure.worker
        verdict = self._restarts.judge(
            event.failure, now=now, committed=self.committed, running=running
        )
        node = self._nodes.get(event.node)
        lost: set[WorkerId] = set()
        if node is not None:
            node.gone.add(worker)
            if node.workers.pop(worker, None) is not None:
                lost.add(worker)
        if verdict is not Verdict.RESTART:
            return self._fail(verdict, event)
        return self._note_lost(lost, now)

    @_apply.register
    def _(self, event: ev.ProgressReported, now: float) -> list[fx.Effect]:
        if self._reports_current_step(event.generation):
            self._progress.observe(
                event.committed, now, step_s=event.step_s, in_step_s=event.in_step_s
            )
        return []

    @_apply.register
    def _(self, event: ev.ShardReported, now: float) -> list[fx.Effect]:
        del now
        generation = self._generations.get(event.generation)
        if generation is None:
            return []
        if self._checkpoints.written(generation, event.step, event.index, event.count):
            return [fx.CommitCheckpoint(generation=event.generation, step=event.step)]
        alive = self._workers()
        dead = [m.worker for m in generation.members if m.worker not in alive]
        return [effect for worker in dead for effect in self._abandon(worker)]

    @_apply.register
    def _(self, event: ev.SaveReportedFailed, now: float) -> list[fx.Effect]:
        del now
        if not self._checkpoints.refused(event.step, event.generation):
            return []
        return [
            fx.AbandonCheckpoint(
                generation=event.generation, step=event.step, message=event.message
            )
        ]

    @_apply.register
    def _(self, event: ev.GenerationPersisted, now: float) -> list[fx.Effect]:
        if self._persisting is None or self._persisting.number != event.number:
            return []
        generation, self._persisting = self._persisting, None
        check_succession(self._current, generation)
        self._current = generation
        self._remember(generation)
        self._formed_at = now
        self._since = _Since(assembling=now if generation.leave_after is None else None)
        self._progress.regroup()
        return [fx.AnnounceGeneration(generation=generation)]

    @_apply.register
    def _(self, event: ev.PersistRefused, now: float) -> list[fx.Effect]:
        del now
        self._enter(JobPhase.FAILED)
        return [fx.EndJob(exit_code=75, message=event.detail)]

    @_apply.register
    def _(self, event: ev.StopRequested, now: float) -> list[fx.Effect]:
        if self._stop is None:
            deadline = now + self._settings.stop_grace_s
            self._stop = Stop(exit_code=event.exit_code, reason=event.reason, deadline=deadline)
            self._enter(JobPhase.DRAINING)
        return []

    @_apply.register
    def _(self, event: ev.TimerFired, now: float) -> list[fx.Effect]:
        del event, now
        return []

    # ---- what follows from the whole view

    def _consider(self, now: float) -> list[fx.Effect]:
        if self._persisting is not None:
            return []  # decided again when it is known to exist
        self._update_since(now)
        decision = self._decide(now)
        if isinstance(decision, Wait):
            self._waiting = decision.reason
            self._settle(decision)
            return [fx.SetTimer(at=self._next_look(decision.until, now))]
        if isinstance(decision, Form):
            return self._form(decision, now)
        if isinstance(decision, End):
            return self._end_stop(in_time=decision.in_time)
        if isinstance(decision, GiveUp):
            self._enter(JobPhase.FAILED)
            message = (
                "the group breaks again and again although no member is lost and no step is "
                f"committed; a member reported: {decision.detail}"
            )
            return [fx.EndJob(exit_code=1, message=message)]
        return self._complete(decision)

    def _complete(self, decision: Complete) -> list[fx.Effect]:
        del decision
        self._enter(JobPhase.FINISHED)
        exit_code = self._stop.exit_code if self._stop is not None else 0
        return [fx.DismissWorkers(), fx.EndJob(exit_code=exit_code)]

    def _decide(self, now: float) -> Decision | End:
        policy = self._settings.formation
        if self._stop is None:
            return decide(self._view(), policy, now)
        return decide_stop(self._view(), policy, self._stop, now)

    def _end_stop(self, *, in_time: bool) -> list[fx.Effect]:
        stop = self._stop
        assert stop is not None
        self._enter(JobPhase.FINISHED if in_time else JobPhase.FAILED)
        message = (
            stop.reason
            if in_time
            else f"the workers did not reach a step boundary and save within "
            f"{self._settings.stop_grace_s:g} s of: {stop.reason}"
        )
        return [fx.EndJob(exit_code=stop.exit_code, message=message)]

    def _form(self, decision: Form, now: float) -> list[fx.Effect]:
        previous, alive = self._current, self._workers()
        lost = tuple(
            m.worker
            for m in (previous.members if previous else ())
            if m.worker not in alive or m.worker in decision.left_out
        )
        if not decision.planned and decision.reason is ChangeReason.GROUP_BROKEN:
            self._count_break()
        self._number += 1
        generation = Generation(
            number=self._number,
            incarnation=self._settings.incarnation,
            members=self._ranked(decision),
            reason=decision.reason,
            leave_after=self._progress.step_after(self._settings.planned_notice_s, now)
            if decision.planned
            else None,
            purpose=Purpose.TRAIN if self._stop is None else Purpose.SAVE_AND_LEAVE,
            save_first=self._checkpoints.abandoned,
        )
        self._persisting = generation
        if self._stop is None:
            self._enter(JobPhase.FORMING if generation.members else JobPhase.WAITING)
        effects: list[fx.Effect] = [self._replacement(w) for w in sorted(decision.left_out)]
        if lost or decision.reason is ChangeReason.GROUP_BROKEN:
            effects.append(fx.Lost(workers=lost, reason=decision.reason, at=now))
        return [*effects, fx.PersistGeneration(generation=generation)]

    def _ranked(self, decision: Form) -> tuple[Any, ...]:
        last = next((g.members for g in reversed(self._generations.values()) if g.members), ())
        workers = self._workers()
        holders = frozenset(w for w, s in workers.items() if s.status.took_part)
        return assign_ranks([m.worker for m in last], decision.members, holders)

    def _replacement(self, worker: WorkerId) -> fx.Effect:
        node = next(n for n, view in self._nodes.items() if worker in view.workers)
        number = self._current.number if self._current else 0
        return fx.ReplaceWorker(
            node=node,
            worker=worker,
            kind=FailureKind.LEFT_OUT,
            message=f"did not arrive in generation {number} in time",
        )

    def _fail(self, verdict: Verdict, event: ev.WorkerFailed) -> list[fx.Effect]:
        self._enter(JobPhase.FAILED)
        exit_code = 78 if verdict is Verdict.NOT_RETRYABLE else 1
        return [fx.EndJob(exit_code=exit_code, verdict=verdict, failure=event.failure)]

    # ---- keeping the view

    def _reports_current_step(self, generation: int) -> bool:
        """Until a planned change takes effect, it is the group before it that makes progress."""
        current = self._current
        if current is None:
            return False
        return generation == current.number or (
            current.leave_after is not None and self._since.assembling is None
        )

    def _view(self) -> GroupView:
        return GroupView(
            current=self._current,
            workers=self._workers(),
            slots=sum(n.slots for n in self._nodes.values()),
            formed_at=self._formed_at,
            enough_since=self._since.enough,
            broken_since=self._since.broken,
            newcomers_since=self._since.newcomers,
            assembling_since=self._since.assembling,
            fruitless_breaks=self._fruitless_breaks(),
            stalled=self._progress.stalled,
        )

    def _workers(self) -> dict[WorkerId, Sighting]:
        return {
            s.worker: Sighting(node=name, status=s)
            for name, node in self._nodes.items()
            for s in node.workers.values()
        }

    def _update_since(self, now: float) -> None:
        """Start or clear the clocks of the conditions that the decision is patient with."""
        current = self._current
        number = current.number if current else 0
        members = current.worker_ids if current else frozenset()
        statuses = [s.status for s in self._workers().values()]
        ready = [s for s in statuses if s.phase is WorkerPhase.READY]
        since = self._since
        can_form = not members and enough(self._workers(), self._settings.formation)
        broken = any(s.broken and s.generation == number and s.worker in members for s in statuses)
        newcomers = any(s.worker not in members for s in ready)
        arrived = any(
            s.generation == number and s.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING)
            for s in statuses
        )
        since.enough = _start_or_clear(since.enough, can_form, now)
        since.broken = _start_or_clear(since.broken, broken, now)
        since.newcomers = _start_or_clear(since.newcomers, newcomers, now)
        if since.assembling is None and arrived:
            since.assembling = now

    def _note_lost(self, workers: set[WorkerId], now: float) -> list[fx.Effect]:
        del now
        return [effect for worker in sorted(workers) for effect in self._abandon(worker)]

    def _abandon(self, worker: WorkerId) -> list[fx.Effect]:
        return [
            fx.AbandonCheckpoint(
                generation=generation, step=step, message=f"{worker} was lost while saving"
            )
            for step, generation in self._checkpoints.lost(worker)
        ]

    def _remember(self, generation: Generation) -> None:
        self._generations[generation.number] = generation
        for number in list(self._generations)[:-_REMEMBERED_GENERATIONS]:
            del self._generations[number]

    def _count_break(self) -> None:
        self._breaks_at_step = (self._fruitless_breaks() + 1, self.committed)

    def _fruitless_breaks(self) -> int:
        count, at_step = self._breaks_at_step
        return count if self.committed <= at_step else 0

    def _settle(self, decision: Wait) -> None:
        if self.phase is JobPhase.FORMING and decision.reason in (
            WaitReason.STEADY,
            WaitReason.COLLECTING_NEWCOMERS,
        ):
            self._enter(JobPhase.RUNNING)

    def _next_look(self, until: float | None, now: float) -> float | None:
        instants = (until, self._stop.deadline if self._stop else None)
        due = [max(at, now) for at in instants if at is not None]
        return min(due) if due else None

    def _enter(self, phase: JobPhase) -> None:
        if phase is self.phase:
            return
        require(phase in TRANSITIONS[self.phase], f"{self.phase.value} to {phase.value}")
        self.phase = phase


def _start_or_clear(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
