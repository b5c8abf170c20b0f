"""The state machine of one worker's membership, from its fork to its dismissal.

Two threads of the process feed the machine under one lock: the link (what the agent says) and the
script's thread (where it is). The machine never blocks: the script's thread asks `joinable`,
`must_leave` and `must_wait`, and waits outside when there is nothing to do.

Without the lock, the script's thread sets only what no event of the link touches: the count of
committed steps and whether the script is inside `session.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic.core.invariants import require
from elastic.core.membership import (
    ChangeReason,
    Generation,
    Purpose,
    WorkerId,
    WorkerPhase,
    WorkerStatus,
)

HOLD_S = 0.5
"""The seconds that a member waits at the boundary of a planned change that is not settled. Then it
leaves: the coordinator may be gone, and leaving costs only a partly computed step."""

# The phases that may follow each phase. The diagram in docs/ARCHITECTURE.md is drawn from this.
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
class FreezeGroup:
    """Let no result of this generation's group count any more, but abort nothing: other members
    could take what an aborted operation sends."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortGroup:
    """Free every thread that is blocked in a collective of this generation's group."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportStatus:
    """Send the status to the agent."""

    status: WorkerStatus


Effect = FreezeGroup | AbortGroup | ReportStatus


class Worker:
    """The machine. Methods named in the past tense are its events, except `superseded`. Most return
    effects, which the caller carries out."""

    def __init__(self, worker: WorkerId, *, pid: int = 0) -> None:
        self._status = WorkerStatus(worker=worker, pid=pid)
        self._committed = 0
        self._in_run = False
        self._announced: Generation | None = None
        self._following: Generation | None = None
        self._is_out_of_time = False
        self._joined = 0
        self._is_tainted = False

    # ---- what the script's thread asks

    @property
    def status(self) -> WorkerStatus:
        """The newest status, to report."""
        s = self._status
        if s.committed == self._committed and s.in_run == self._in_run:
            return s
        return replace(s, committed=self._committed, in_run=self._in_run)

    @property
    def announced(self) -> Generation | None:
        """The newest generation that was announced, in its newest form."""
        return self._announced

    @property
    def following(self) -> Generation | None:
        """The newest announced generation, if it follows the one that is joined or being joined."""
        return self._following

    @property
    def is_out_of_time(self) -> bool:
        """The job stops, and members that go on with their steps keep the others from the save: a
        block in progress is given up."""
        return self._is_out_of_time

    @property
    def is_tainted(self) -> bool:
        """The worker's own state does not count. It has not got another one yet."""
        return self._is_tainted

    def joinable(self) -> Generation | None:
        """The generation to join now. None: wait."""
        generation = self._announced
        if self._status.phase is not WorkerPhase.READY or generation is None:
            return None
        if generation.number <= self._status.generation or generation.freezes:
            return None
        # A member that the planned change drops may have committed more steps in the broken group.
        # So the change takes effect only at its boundary, or an unplanned change follows.
        at_boundary = self._is_behind(generation) or generation.is_due(self._committed)
        if self._status.broken and (generation.provisional or not at_boundary):
            return None
        return generation if self._status.worker in generation.worker_ids else None

    def must_leave(self, committed: int) -> bool:
        """At a step boundary: whether to leave the group here."""
        following = self._following
        if following is None:
            return False
        leave_after = following.leave_after
        if leave_after is None or self._is_behind(following):
            return True
        return not following.provisional and committed >= leave_after

    def must_wait(self, committed: int) -> bool:
        """At a step boundary: whether to wait here until the planned change is settled."""
        following = self._following
        if following is None or following.leave_after is None or self._is_behind(following):
            return False
        return following.provisional and committed >= following.leave_after

    # ---- events

    def attached(self) -> list[Effect]:
        """The script called elastic.init()."""
        return self._become(WorkerPhase.SPARE)

    def assigned(self, slot: int) -> list[Effect]:
        """The agent gave the worker a slot. It repeats this to a worker that reports as a spare."""
        if self._status.phase is not WorkerPhase.SPARE and self._status.slot == slot:
            return []
        return self._become(WorkerPhase.PREPARING, slot=slot)

    def prepared(self, endpoint: str, *, queues: bool = False) -> list[Effect]:
        """The script needs a group for the first time. Its store listens at `endpoint`. queues: its
        groups' operations are queued on a device."""
        return self._become(WorkerPhase.READY, endpoint=endpoint, queues=queues)

    def generation_announced(self, generation: Generation) -> list[Effect]:
        """The coordinator announced a generation. One that is not newer is ignored."""
        if not generation.is_news_after(self._announced):
            return []
        self._announced = generation
        if generation.number > self._status.generation:
            self._following = generation
        if generation.purpose is Purpose.SAVE_AND_LEAVE:
            self._is_out_of_time |= generation.reason is ChangeReason.STALLED
        effects: list[Effect] = []
        if generation.freezes:  # before the report: others abort when all have acknowledged
            effects.append(FreezeGroup(generation=self._status.generation))
        if generation.number > self._status.acknowledged:
            effects += self._acknowledge(generation)
        if generation.number == self._status.generation or generation.freezes:
            return effects
        # The report comes first: the thread that the abort frees reports too, and its report, which
        # is newer, must come last.
        if self._has_group() and (generation.leave_after is None or self._is_behind(generation)):
            effects.append(AbortGroup(generation=self._status.generation))
        return effects

    def _acknowledge(self, generation: Generation) -> list[Effect]:
        # The report reads the count of steps only now, when `following` is set. The script's thread
        # counts a step before it looks at `following`: if it saw none, the step is in this report.
        self._status = replace(self.status, acknowledged=generation.number)
        return [ReportStatus(status=self.status)]

    def join_began(self, generation: Generation) -> list[Effect]:
        """The script's thread began to build the group of `generation`."""
        if self._following is not None and self._following.number == generation.number:
            self._following = None
        me = self._status.worker
        self._is_tainted |= any(
            self._joined < m.counts_from for m in generation.members if m.worker == me
        )
        return self._become(
            WorkerPhase.JOINING,
            generation=generation.number,
            broken=False,
            detail="",
            has_state=self._status.has_state and not self._is_tainted,
        )

    def joined(self, generation: Generation, committed: int) -> list[Effect]:
        """The group has formed and agreed on the last committed step."""
        trains = generation.purpose is Purpose.TRAIN  # else the generation commits no step
        trained_in = generation.number if trains else self._status.trained_in
        self._joined, self._is_tainted = generation.number, False
        return self._become(WorkerPhase.TRAINING, committed, has_state=True, trained_in=trained_in)

    def superseded(self) -> bool:
        """Whether a newer generation should be joined at once, instead of the present one."""
        following = self._following
        return following is not None and (
            following.leave_after is None or self._is_behind(following)
        )

    def state_dropped(self) -> list[Effect]:
        """The state of another member begins to overwrite this worker's, or a block could not be
        undone. The state is whole again once the worker has joined, or when it reports so (`held`)
        because the group is lost before that."""
        self._status = replace(self._status, has_state=False)
        return [ReportStatus(status=self.status)]

    def group_left(self, committed: int, *, held: bool = False) -> list[Effect]:
        """The group was left at a step boundary, as planned or because it was superseded. held: the
        worker's state is whole, even if it was received for this group."""
        return self._become(WorkerPhase.READY, committed, has_state=self._is_whole(held))

    def group_broke(self, committed: int, detail: str, *, held: bool = False) -> list[Effect]:
        """A collective failed, or the group could not be built. held: as for `group_left`."""
        has_state = self._is_whole(held)
        return self._become(
            WorkerPhase.READY, committed, broken=True, detail=detail, has_state=has_state
        )

    def run_entered(self) -> None:
        """The script entered `session.run`. Reported only with the next status."""
        self._in_run = True

    def run_left(self) -> None:
        self._in_run = False

    def committed(self, committed: int) -> None:
        """A step was committed. Reported with the next progress, not by itself."""
        self._committed = committed

    def finished(self, committed: int) -> list[Effect]:
        """The script ended without an error."""
        return self._become(WorkerPhase.FINISHED, committed)

    # ---- inside

    def _is_behind(self, following: Generation) -> bool:
        """Whether this worker missed a generation before `following`. Then its own group was given
        up, and the boundary of `following` is one of the generation directly before that."""
        return self._status.generation < following.number - 1

    def _is_whole(self, held: bool) -> bool:
        return held or self._status.has_state

    def _has_group(self) -> bool:
        """Whether there may be a group to abort. One whose operations queue is kept, frozen, after
        the script has left it."""
        s = self._status
        kept = s.queues and s.phase is WorkerPhase.READY and s.generation > 0
        return kept or s.phase in (WorkerPhase.JOINING, WorkerPhase.TRAINING)

    def _become(
        self, phase: WorkerPhase, committed: int | None = None, **changes: object
    ) -> list[Effect]:
        before = self._status.phase
        require(phase in TRANSITIONS[before], f"worker: {before.name} to {phase.name}")
        if committed is not None:
            self._committed = committed
        self._status = replace(self.status, phase=phase, **changes)  # type: ignore[arg-type]
        return [ReportStatus(status=self._status)]
