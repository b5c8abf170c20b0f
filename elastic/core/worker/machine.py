"""One worker's place in the job: from its fork to its dismissal.

Two threads of the process feed it, under one lock: the link (what the agent says) and the
script's own thread (where it is). It never blocks; the script's thread asks `joinable`,
`must_leave` and `holds`, and waits outside when there is nothing to do.

Without the lock the script's thread sets only what no event of the link touches: the count of
committed steps and whether it is inside `session.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic.core.invariants import require
from elastic.core.membership import Generation, Purpose, WorkerId, WorkerPhase, WorkerStatus

HOLD_S = 0.5
"""A member waits this long at the boundary of a planned change that is not settled. Then it leaves:
the coordinator may be gone, and what it costs is a partly computed step."""

# From each phase to those that may follow it; the diagram in docs/ARCHITECTURE.md is drawn from it.
TRANSITIONS: Mapping[WorkerPhase, frozenset[WorkerPhase]] = {
    WorkerPhase.STARTING: frozenset({WorkerPhase.SPARE, WorkerPhase.FINISHED}),
    WorkerPhase.SPARE: frozenset({WorkerPhase.PREPARING}),
    WorkerPhase.PREPARING: frozenset({WorkerPhase.READY, WorkerPhase.FINISHED}),
    WorkerPhase.READY: frozenset({WorkerPhase.JOINING, WorkerPhase.FINISHED}),
    WorkerPhase.JOINING: frozenset({WorkerPhase.TRAINING, WorkerPhase.READY}),
    WorkerPhase.TRAINING: frozenset({WorkerPhase.READY, WorkerPhase.FINISHED}),
    WorkerPhase.FINISHED: frozenset(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortGroup:
    """Free every thread that is blocked in a collective of this generation's group."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportStatus:
    """Tell the agent."""

    status: WorkerStatus


Effect = AbortGroup | ReportStatus


class Worker:
    """The machine. Methods named in the past tense are its events; each returns its effects."""

    def __init__(self, worker: WorkerId, *, pid: int = 0) -> None:
        self._status = WorkerStatus(worker=worker, pid=pid)
        self._committed = 0
        self._in_run = False
        self._announced: Generation | None = None
        self._following: Generation | None = None

    # ---- what the script's thread asks

    @property
    def status(self) -> WorkerStatus:
        """What there is to report."""
        s = self._status
        if s.committed == self._committed and s.in_run == self._in_run:
            return s
        return replace(s, committed=self._committed, in_run=self._in_run)

    @property
    def announced(self) -> Generation | None:
        """The newest generation heard of, in its newest form."""
        return self._announced

    @property
    def following(self) -> Generation | None:
        """The newest generation heard of, if it comes after the one that is joined or being so."""
        return self._following

    def joinable(self) -> Generation | None:
        """The generation to join now, or None: wait."""
        generation = self._announced
        if self._status.phase is not WorkerPhase.READY or generation is None:
            return None
        if generation.number <= self._status.generation:
            return None
        # A member that a planned change drops may have got further in the broken group: it takes
        # effect where it says, or an unplanned one follows.
        at_boundary = self._is_behind(generation) or generation.is_due(self._committed)
        if self._status.broken and (generation.provisional or not at_boundary):
            return None
        return generation if self._status.worker in generation.worker_ids else None

    def must_leave(self, committed: int) -> bool:
        """At a step boundary: has the group been superseded?"""
        following = self._following
        if following is None:
            return False
        leave_after = following.leave_after
        if leave_after is None or self._is_behind(following):
            return True
        return not following.provisional and committed >= leave_after

    def holds(self, committed: int) -> bool:
        """At a step boundary: is it to be settled here whether the group is left?"""
        following = self._following
        if following is None or following.leave_after is None or self._is_behind(following):
            return False
        return following.provisional and committed >= following.leave_after

    # ---- events

    def attached(self) -> list[Effect]:
        """The script called elastic.init()."""
        return self._become(WorkerPhase.SPARE)

    def assigned(self, slot: int) -> list[Effect]:
        """The agent gave it a slot; it says so again to a worker that reports itself a spare."""
        if self._status.phase is not WorkerPhase.SPARE and self._status.slot == slot:
            return []
        return self._become(WorkerPhase.PREPARING, slot=slot)

    def prepared(self, endpoint: str) -> list[Effect]:
        """The script needs a group for the first time; its store listens at `endpoint`."""
        return self._become(WorkerPhase.READY, endpoint=endpoint)

    def generation_announced(self, generation: Generation) -> list[Effect]:
        """The coordinator decided. Older news than the newest known is refused."""
        if not generation.is_news_after(self._announced):
            return []
        self._announced = generation
        if generation.number > self._status.generation:
            self._following = generation
        effects: list[Effect] = []
        if generation.number > self._status.acknowledged:
            effects += self._acknowledge(generation)
        if generation.number == self._status.generation:
            return effects
        # Reported first: the thread that the abort frees reports too, and must not be overtaken.
        if self._in_group() and (generation.leave_after is None or self._is_behind(generation)):
            effects.append(AbortGroup(generation=self._status.generation))
        return effects

    def _acknowledge(self, generation: Generation) -> list[Effect]:
        # The report reads the count of steps only now: the script's thread, which counts a step
        # and then looks for news, cannot have looked in vain after a step that is not reported.
        self._status = replace(self.status, acknowledged=generation.number)
        return [ReportStatus(status=self.status)]

    def join_began(self, generation: Generation) -> list[Effect]:
        """The script's thread builds the group of `generation`."""
        if self._following is not None and self._following.number == generation.number:
            self._following = None
        return self._become(
            WorkerPhase.JOINING, generation=generation.number, broken=False, detail=""
        )

    def joined(self, generation: Generation, committed: int) -> list[Effect]:
        """The group stands and has agreed on the last committed step."""
        trains = generation.purpose is Purpose.TRAIN  # else it adds no step to those it began with
        trained_in = generation.number if trains else self._status.trained_in
        return self._become(WorkerPhase.TRAINING, committed, has_state=True, trained_in=trained_in)

    def superseded(self) -> bool:
        """A newer generation is to be joined at once instead of the present one."""
        following = self._following
        return following is not None and (
            following.leave_after is None or self._is_behind(following)
        )

    def state_dropped(self) -> list[Effect]:
        """The state of a member that is ahead begins to overwrite its own, or a block could not be
        undone. It is whole again, and worth being asked for, when it has joined, or says so as the
        group is lost before."""
        self._status = replace(self._status, has_state=False)
        return [ReportStatus(status=self.status)]

    def group_left(self, committed: int, *, held: bool = False) -> list[Effect]:
        """Left at a step boundary, as planned, or the group was superseded. held: with a state that
        is whole, be it one that was received for this group."""
        return self._become(WorkerPhase.READY, committed, has_state=self._holds(held))

    def group_broke(self, committed: int, detail: str, *, held: bool = False) -> list[Effect]:
        """A collective, or the building of the group, failed."""
        has_state = self._holds(held)
        return self._become(
            WorkerPhase.READY, committed, broken=True, detail=detail, has_state=has_state
        )

    def run_entered(self) -> None:
        """The script is inside `session.run`: reported if the group is lost there."""
        self._in_run = True

    def run_left(self) -> None:
        """`session.run` has returned."""
        self._in_run = False

    def committed(self, committed: int) -> None:
        """A step was committed: reported with the next progress, not by itself."""
        self._committed = committed

    def finished(self, committed: int) -> list[Effect]:
        """The script has ended well."""
        return self._become(WorkerPhase.FINISHED, committed)

    # ---- inside

    def _is_behind(self, following: Generation) -> bool:
        """The step at which a planned change takes effect is one of the generation before it. A
        member of an earlier one missed the news that its group was given up."""
        return self._status.generation < following.number - 1

    def _holds(self, held: bool) -> bool:
        return held or self._status.has_state

    def _in_group(self) -> bool:
        return self._status.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING)

    def _become(
        self, phase: WorkerPhase, committed: int | None = None, **changes: object
    ) -> list[Effect]:
        before = self._status.phase
        require(phase in TRANSITIONS[before], f"worker: {before.name} to {phase.name}")
        if committed is not None:
            self._committed = committed
        self._status = replace(self.status, phase=phase, **changes)  # type: ignore[arg-type]
        return [ReportStatus(status=self._status)]
