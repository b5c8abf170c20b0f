"""One worker's place in the job: from its fork to its dismissal.

Two threads of the process feed it, under one lock: the link (what the agent says) and the
script's own thread (where it is). It never blocks; the script's thread asks `joinable` and
`must_leave`, and waits outside when there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic.core.invariants import require
from elastic.core.membership import Generation, WorkerId, WorkerPhase, WorkerStatus

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
    """Free whoever is blocked in a collective of this generation's group."""

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
        self._announced: Generation | None = None
        self._joined: Generation | None = None

    # ---- what the script's thread asks

    @property
    def status(self) -> WorkerStatus:
        """What was last reported."""
        return self._status

    @property
    def announced(self) -> Generation | None:
        """The newest generation heard of."""
        return self._announced

    def joinable(self) -> Generation | None:
        """The generation to join now, or None: wait."""
        generation = self._announced
        if self._status.phase is not WorkerPhase.READY or generation is None:
            return None
        if generation.number <= self._status.generation:
            return None
        return generation if self._status.worker in generation.worker_ids else None

    def must_leave(self, committed: int) -> bool:
        """At a step boundary: has the group been superseded?"""
        if self._announced is self._joined or self._announced is None:
            return False
        leave_after = self._announced.leave_after
        return leave_after is None or committed >= leave_after

    # ---- events

    def attached(self) -> list[Effect]:
        """The script called elastic.init()."""
        return self._become(WorkerPhase.SPARE)

    def assigned(self, slot: int) -> list[Effect]:
        """The agent gave it a slot."""
        return self._become(WorkerPhase.PREPARING, slot=slot)

    def prepared(self, endpoint: str) -> list[Effect]:
        """The script needs a group for the first time; its store listens at `endpoint`."""
        return self._become(WorkerPhase.READY, endpoint=endpoint)

    def generation_announced(self, generation: Generation) -> list[Effect]:
        """The coordinator decided. Older news than the newest known is refused."""
        if self._announced is not None and generation.number <= self._announced.number:
            return []
        self._announced = generation
        self._status = replace(self._status, heard=generation.number)
        # Reported first: the thread that the abort frees reports too, and must not be overtaken.
        effects: list[Effect] = [ReportStatus(status=self._status)]
        if self._in_group() and generation.leave_after is None:
            effects.append(AbortGroup(generation=self._status.generation))
        return effects

    def join_began(self, generation: Generation) -> list[Effect]:
        """The script's thread builds the group of `generation`."""
        return self._become(
            WorkerPhase.JOINING, generation=generation.number, broken=False, detail=""
        )

    def joined(self, generation: Generation, committed: int) -> list[Effect]:
        """The group stands and has agreed on the last committed step."""
        self._joined = generation
        return self._become(WorkerPhase.TRAINING, committed=committed, took_part=True)

    def superseded(self) -> bool:
        """A newer generation is to be joined at once instead of the present one."""
        newest = self._announced
        return (
            newest is not None
            and newest.number > self._status.generation
            and newest.leave_after is None
        )

    def state_dropped(self) -> list[Effect]:
        """The state of a member that is ahead begins to overwrite its own, which is whole again,
        and worth being asked for, only when it has joined."""
        self._status = replace(self._status, took_part=False)
        return [ReportStatus(status=self._status)]

    def group_left(self, committed: int) -> list[Effect]:
        """Left at a step boundary, as planned, or the group was superseded."""
        return self._become(WorkerPhase.READY, committed=committed)

    def group_broke(self, committed: int, detail: str) -> list[Effect]:
        """A collective, or the building of the group, failed."""
        return self._become(WorkerPhase.READY, committed=committed, broken=True, detail=detail)

    def run_entered(self) -> None:
        """The script is inside `session.run`: reported if the group is lost there."""
        self._status = replace(self._status, in_run=True)

    def run_left(self) -> None:
        """`session.run` has returned."""
        self._status = replace(self._status, in_run=False)

    def committed(self, committed: int) -> None:
        """A step was committed: reported with the next progress, not by itself."""
        self._status = replace(self._status, committed=committed)

    def finished(self, committed: int) -> list[Effect]:
        """The script has ended well."""
        return self._become(WorkerPhase.FINISHED, committed=committed)

    # ---- inside

    def _in_group(self) -> bool:
        return self._status.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING)

    def _become(self, phase: WorkerPhase, **changes: object) -> list[Effect]:
        before = self._status.phase
        require(phase in TRANSITIONS[before], f"worker: {before.name} to {phase.name}")
        self._status = replace(self._status, phase=phase, **changes)  # type: ignore[arg-type]
        return [ReportStatus(status=self._status)]
