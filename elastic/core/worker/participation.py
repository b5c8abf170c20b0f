"""The protocol by which a script goes through the groups of a job: join, agree, train, commit.

It does no I/O. Each method for a call of the script is a generator: it yields the actions below for
its driver to carry out, and is resumed with their results, until it returns. The driver throws
`GroupLost` into it if an action ends with the loss of the group ("Raises GroupLost"). In production
worker/training.py is the driver, with processes and tensors; the simulator drives the same code.

What a member holds, and when that is valid:

- `progress` is replaced as a whole, by a commit or by what another member or storage gives.
- What follows from the last commit and the generation (the ramps of the learning rate) is derived
  again in every group and kept only with the next commit, so it cannot differ between members.
- `intact`: the tracked state is exactly the one after `progress.committed` steps. It becomes False
  when another state begins to overwrite it, or when a block that was given up cannot be undone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from elastic.core.data_order import DataPosition, SampleRange, advance
from elastic.core.invariants import require
from elastic.core.learning_rate import Ramp, ScalingRule, retarget
from elastic.core.membership import Generation, Purpose
from elastic.core.recovery import (
    Declaration,
    Mark,
    RecoveryPlan,
    agree_so_far,
    calls_done,
    mismatching_ranks,
    plan_recovery,
    runs_to_repeat,
)
from elastic.core.reductions import Disagreement, Made, Rhythm, disagreement, without_doubtful
from elastic.core.worker.machine import HOLD_S, Worker
from elastic.errors import GroupLost, StateLost, StateTorn, StepMisused, Stranded

Call: TypeAlias = Any
"""A call of the script, in the driver's own type."""
Ramps: TypeAlias = Mapping[str, Ramp]
NO_RAMPS: Ramps = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the job is: what the session itself adds to the tracked state.

    committed: the committed steps of the job. committed_in: the generation of the last commit.
    loop: the script's loop over `session.steps` at that commit, from 0. positions: how much of each
    loader's data is consumed; loaders are numbered in the order in which the script first used
    them. ramps: those of the learning rates, by the number of the scaled optimizer as text.
    """

    committed: int = 0
    committed_in: int = 0
    loop: int = 0
    positions: tuple[DataPosition, ...] = ()
    ramps: Mapping[str, Ramp] = field(default_factory=lambda: NO_RAMPS)

    def position(self, loader: int) -> DataPosition:
        return self.positions[loader] if loader < len(self.positions) else DataPosition()

    def after(
        self, samples: SampleRange, *, loader: int, loop: int, generation: int, ramps: Ramps
    ) -> Progress:
        """The progress after one more step, which consumed `samples` of `loader`."""
        positions = list(self.positions)
        while len(positions) <= loader:
            positions.append(DataPosition())
        positions[loader] = advance(positions[loader], samples)
        return Progress(
            committed=self.committed + 1,
            committed_in=generation,
            loop=loop,
            positions=tuple(positions),
            ramps=ramps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A place in a group: the result of `Join`."""

    generation: Generation
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """Wait for a generation to join, and build its group. Meanwhile, compute the digests that
    `Declare` needs. Returns a Seat. Raises GroupLost.

    held: this member holds a whole state. at_begin: the state is at the begin mark.
    """

    held: bool
    at_begin: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Declare:
    """Give `mine` to every member, with the digests filled in. Returns all declarations, in rank
    order. Raises GroupLost.

    whole: the digests must be of all state. Else they may leave out what `CompareUnread` compares.
    """

    mine: Declaration
    whole: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainMismatch:
    """Rank `reference` tells the `odd` ranks what it tracks, and these raise ModelMismatch."""

    reference: int
    odd: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DropState:
    """Report that this member no longer holds a whole state: another member's state will overwrite
    it, or a block could not be undone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send the tracked state as of `mark`, and `progress`, to `rank`. Raises GroupLost."""

    rank: int
    progress: Progress
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Receive:
    """Take over the state that `rank` sends, and pass it on to rank `then`, if that is not None.
    Returns its progress. A state of a later loop than `loop` is postponed until `TakePostponed`.
    Raises GroupLost."""

    rank: int
    loop: int
    mark: Mark
    then: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Load the newest checkpoint. Returns its progress, or None if there is none. A state of a
    later loop than `loop` is postponed until `TakePostponed`."""

    loop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCheckpoint:
    """Read the checkpoint that rank 0 restores, whose node has read it then, so that `Receive` gets
    only what is not the same here. Returns whether that has overwritten what this member tracks.
    """

    loop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakePostponed:
    """Put the state in place that was postponed: the script has come to its loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellDifference:
    """Report that members held different states of the same step, as an event. The members `ranks`
    will receive the state of rank `right`."""

    ranks: tuple[int, ...]
    right: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """Wrap the models and plan the batches: the members have agreed on one state."""

    seat: Seat


@dataclass(frozen=True, kw_only=True, slots=True)
class TearDown:
    """Unwrap the models: the group is gone, or is about to be left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellJoined:
    """Report that this member trains in the group of its seat, from `committed` steps on."""

    committed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """Report how the group was formed: everything is set up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """Close the group at a boundary, and report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """Close the lost group at once, so that its other members are freed too, and report it."""

    error: GroupLost
    held: bool
    """This member's state is whole, so that another member may receive it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitSettlement:
    """Wait until a planned change is settled. Returns False after `timeout_s`."""

    committed: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitSuccessor:
    """Wait until a generation that follows this group's is announced, or for `timeout_s` seconds.
    None: without a limit."""

    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBack:
    """Undo what a block changed. Returns whether the state is again that of the block's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepForRetry:
    """Remember the state, for `PutBackForRetry`: the block does not count, yet the script runs the
    code below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBackForRetry:
    """Undo what the script did since `KeepForRetry`: the same step is handed out again. Returns
    whether that was possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareReplicas:
    """Compare the parameters of all members. Raises GroupLost, or an error that names the members
    that differ although nothing was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareUnread:
    """Compare with all members what the declared digests have left out. Returns whether all have
    the same. Raises GroupLost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Begin to save this member's share, in the background."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveAndWait:
    """Save, and wait until the checkpoint is complete or abandoned. Raises GroupLost if the group
    is superseded meanwhile."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveJob:
    """Leave the job here: raises the exception that unwinds the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetForCall:
    """Wait until every member has come to call `number` since the last commit, and compare what
    they call. Raises GroupLost, or an error that names both calls if they differ."""

    committed: int
    number: int
    call: Call


@dataclass(frozen=True, kw_only=True, slots=True)
class Perform:
    """Make the call. Returns its result; raises GroupLost."""

    call: Call


Action: TypeAlias = (
    Join
    | Declare
    | ExplainMismatch
    | DropState
    | Send
    | Receive
    | Restore
    | ReadCheckpoint
    | TakePostponed
    | TellDifference
    | SetUp
    | TearDown
    | TellJoined
    | Entered
    | Leave
    | Break
    | AwaitSettlement
    | AwaitSuccessor
    | PutBack
    | KeepForRetry
    | PutBackForRetry
    | CompareReplicas
    | CompareUnread
    | Save
    | SaveAndWait
    | LeaveJob
    | MeetForCall
    | Perform
)

Steps: TypeAlias = Generator[Action, Any, Any]

_TOLD_S = 1.0
"""The seconds for which members keep a group open in which another member cannot go on. That member
may not have received all declarations yet: if the others closed their connections at once, it would
never learn that it must make room, and the same members would meet again and again."""


class Batches(Protocol):
    """What the protocol needs of a loop's loader."""

    def batch_ratio(self, world_size: int, reference_world: int) -> float:
        """The global batch with `world_size` workers / the one with `reference_world` workers."""
        ...


class Participation:
    """One worker's part in the job, as its script sees it.

    worker: the membership machine. save_every: committed steps between two checkpoints. 0: no
    checkpoints. receives_in_place: there is no room for two states, so a received state overwrites
    the member's own from its first byte on.
    """

    def __init__(
        self, worker: Worker, *, save_every: int = 0, receives_in_place: bool = True
    ) -> None:
        self._worker = worker
        self._receives_in_place = receives_in_place
        self._save_every = save_every
        self.progress = Progress()
        self.seat: Seat | None = None
        """The place in the group that everything is set up for. None between two groups."""
        self.intact = False
        self.took_part = False
        self.loop = -1
        """The loop over `session.steps` that the script is in or was in last, from 0."""
        self.loader = 0
        self.ramps: Ramps = NO_RAMPS
        """The ramps that apply here. They become part of `progress` with the next commit."""
        self.rules: list[ScalingRule] = []
        self.holds_back = False
        """The member's state is of a later loop, and waits until the script has come there."""
        self.runs_done = 0
        """Calls of `session.run` completed since the last commit."""
        self._runs_at_begin = 0
        """The value of `runs_done` when the step was handed out."""
        self._batches: Batches | None = None
        self._last_call: Call = None
        self._in_run = False
        self._in_block = False
        self._at_begin = False
        self._last_block_discarded = False
        self._overwritten = False
        self._begun = False
        """A group has begun with the state. False for one that was restored for a group which was
        lost before that."""
        self._saved_step = -1
        self._save_owed = False
        self._compare_due = False
        self.agreed_at = 0
        """The committed steps on which the members of the present group agreed."""
        self.unread = False
        """The group began with the next step before the members had compared all of their state.
        The driver compares it before anything changes that state, and calls `read`."""
        self._reads_whole = False
        """The next group compares all before it begins, because members differ."""
        self._newcomers = False
        self._repeat_from = 0
        self._calls_of_others = 0
        """The most calls since the last commit that any member has completed."""
        self._all_between = False
        """All members of the group have come to it from the code below the last committed block."""
        self._left = False
        self._counts_in = 0
        """The generation in which the next three count. 0: not known."""
        self.reduced = 0
        """Reductions of the steps that this member has committed in its group."""
        self.begun = 0
        """Reductions that it has begun in its group, including those of the block."""
        self.made: Made = ()
        """The reductions of the block; the driver adds those of each pass here and to `begun`."""
        self.rhythm = Rhythm()
        self.doubtful = False
        """The group was lost before the members had compared the reductions of the last step."""

    @property
    def here(self) -> Progress:
        """The progress at this place of the script: a loop may have begun since the last commit."""
        loop = max(self.loop, 0)
        return self.progress if loop == self.progress.loop else replace(self.progress, loop=loop)

    @property
    def position(self) -> DataPosition:
        """How much of the present loader's data is consumed."""
        return self.progress.position(self.loader)

    @property
    def last_block_discarded(self) -> bool:
        """The block that the script left last does not count: what the script does until the same
        step is handed out again is undone."""
        return self._last_block_discarded

    @property
    def at_begin(self) -> bool:
        """The state, less what the block has changed, is the one with which that block begins."""
        return self._at_begin

    @property
    def owes_step(self) -> bool:
        """The script's last block does not count, or was left by an exception: the script must come
        to the next boundary before anything else."""
        return self._last_block_discarded or self._in_block

    @property
    def skips(self) -> bool:
        """The job is past the script's present loop."""
        return self.holds_back and self.progress.loop > self.loop

    @property
    def _is_behind(self) -> bool:
        """Other members' scripts are at a later place: in a later loop, or past a call that this
        script has not come to."""
        return self.holds_back or self.runs_done < self._calls_of_others

    # ---- what the script does

    def begin_loop(self, loader: int, batches: Batches) -> Steps:
        self.loop += 1
        self.loader, self._batches = loader, batches
        try:
            if self.seat is None:
                if not self.took_part:
                    yield from self._enter()
            elif not self.holds_back:
                yield from self._set_up(self.seat)
            if self.holds_back and self.progress.loop <= self.loop:
                require(self.progress.loop == self.loop, "a loop was skipped")
                yield from self._arrive()
        except GroupLost as error:  # during the set-up; `boundary` joins the next group
            yield from self.lose(error)

    def passes_boundary(self) -> bool:
        """Between two steps: pass to the next one if there is nothing to do before it, which is the
        usual case. Returns False if the caller must drive `boundary` instead."""
        seat = self.seat
        if (
            seat is None
            or seat.generation.purpose is not Purpose.TRAIN
            or self._last_block_discarded
            or self._worker.following is not None
            or self._is_behind
            or self._comparison_is_due()
            or self._save_is_due()
        ):
            return False
        self._at_begin = True
        self._runs_at_begin = self.runs_done
        return True

    def boundary(self) -> Steps:
        """Between two steps: leave a group that was superseded, join one if there is none, and do
        what is due (leave the job, compare replicas, save)."""
        while True:
            try:
                if self._last_block_discarded:
                    self._last_block_discarded = False
                    yield from self._put_back_for_retry()
                self._at_begin = True
                if self.seat is None or self._worker.following is not None:  # rare
                    yield from self._be_in_current_group()
                if not self._is_behind:  # else the others have these behind them
                    yield from self._duties()
            except GroupLost as error:
                yield from self.lose(error)
                continue
            self._runs_at_begin = self.runs_done
            return

    def end_loop(self, meet: Call) -> Steps:
        """The loop has no step left. Meet at its end, because a member that is a step behind still
        needs another's state, and begin to save the result, whatever the checkpoint interval."""
        if self.holds_back:
            return
        behind = (yield from self._run(meet))[1]
        if self.progress.committed > 0 and not behind:  # else others save at a later place
            yield Save(progress=self.here)

    def begin_block(self) -> None:
        self._in_block = True
        self.made = ()

    def commit(self, samples: SampleRange) -> None:
        require(self.seat is not None and self.intact, "a step was committed without a group")
        require(not self.unread, "a step was committed before all members were known to agree")
        assert self.seat is not None
        self.progress = self.progress.after(
            samples,
            loader=self.loader,
            loop=self.loop,
            generation=self.seat.generation.number,
            ramps=self.ramps,
        )
        rhythm = self.rhythm
        if rhythm.is_steady and self.made == rhythm.expected:
            rhythm.length += 1
        else:
            rhythm.note(self.made)
        self.reduced = self.begun
        self._in_block = self._at_begin = False
        self.runs_done, self._last_call = 0, None
        self._calls_of_others = 0
        self._compare_due, self._reads_whole = True, False
        self._worker.committed(self.progress.committed)

    def read(self, *, same: bool) -> None:
        """The members have compared what was `unread`. Raises GroupLost if it is not the same: the
        next group finds out whose is right."""
        self.unread, self._reads_whole = False, not same
        if not same:
            raise GroupLost("the members hold different states of the same step")

    def give_up_block(self, error: GroupLost) -> Steps:
        """The group was lost inside the block. Join the next one. Returns whether the step counts
        nevertheless, because others completed it and this member has received their state."""
        index = self.progress.committed
        yield from self._put_back()
        yield from self.lose(error)
        yield from self._enter()
        self._in_block = False
        self._worker.run_left()
        counts = self.progress.committed > index and not self._at_begin
        if not counts:
            self._last_block_discarded = True
            yield KeepForRetry()
        return counts

    def hand_over_state(self) -> Steps:
        """The script's thread hangs in this block for good. Undo the block and take the state into
        the next group of several members, because no other worker may hold it. Another thread
        drives this, and the worker ends afterwards."""
        yield from self._put_back()
        while True:
            yield from self.lose(GroupLost("the script's thread hangs in a lost group"))
            if not self.intact:
                return
            yield from self._enter()
            if self.seat is not None and self.seat.generation.world_size > 1:
                return
            yield AwaitSuccessor()

    def leave_early(self, ends: Call, *, whole: bool) -> Steps:
        """The job stops, and has no time for what the script's thread does, which was stopped for
        good: save the state that this began from, and leave the job. Another thread drives this.
        Returns False if other members have to save what they hold, or none is whole.

        ends: the call that every script makes at its end. whole: outside of the block and what
        stands above it, the driver has put back the state; in there, it can.
        """
        begins, in_call = self._in_block or self._at_begin, self._in_run
        if begins and whole:
            yield from self._put_back()
        elif self.intact and not whole:
            yield DropState()
            self.intact = False
        yield from self.lose(GroupLost("the job stops, and has no time left for the script"))
        if not self.intact:
            return False
        yield from self._enter()
        self._in_block = False
        seat = self.seat
        saves = seat is not None and seat.generation.purpose is Purpose.SAVE_AND_LEAVE
        # All must save the state of one place. A member that is past it has a later step, or the
        # changes of the code between two blocks.
        at_one_place = in_call or self._at_begin or (not begins and self._all_between)
        if not saves or not at_one_place or self._is_behind:
            return False
        self._left = True  # no exception has to unwind the script
        yield from self._run(ends)
        return True

    def run(self, call: Call) -> Steps:
        """Make a call together with the other members, in the next group if this one is lost.
        Returns the call's result."""
        return (yield from self._run(call))[0]

    def _run(self, call: Call) -> Steps:
        """`run`, which returns (the result, whether other members had completed the call before).
        Raises Stranded while the state waits for a later loop."""
        if self.holds_back:
            raise Stranded(
                f"the job is at loop {self.progress.loop + 1} over session.steps(), and this "
                f"worker's script calls session.run() in loop {self.loop + 1}; a fresh worker "
                "takes its place"
            )
        self._in_run, self._at_begin = True, False
        self._worker.run_entered()
        try:
            while True:
                try:
                    if self.seat is None:
                        yield from self._enter()
                    if self._last_block_discarded and self._newcomers:
                        raise GroupLost("a newcomer does not make the calls below a lost block")
                    behind = self._is_behind
                    if not behind:  # else the others are to leave from a later place
                        yield from self._leave_job_if_told()
                    committed = self.progress.committed
                    yield MeetForCall(committed=committed, number=self.runs_done, call=call)
                    yield from self._read()
                    self._last_call = None  # all completed that one; the next changes the state
                    result = yield Perform(call=call)
                except GroupLost as error:
                    if isinstance(error, StateTorn) and self.intact:
                        yield DropState()
                        self.intact = False
                    yield from self.lose(error)
                    continue
                self.runs_done += 1
                self._last_call = call
                return result, behind
        finally:
            self._in_run = False
            self._worker.run_left()

    def lose(self, error: GroupLost) -> Steps:
        self.seat = None
        yield TearDown()
        yield Break(error=error, held=self.intact and self._begun)

    def _put_back(self) -> Steps:
        """Undo the block: the state is that of the block's start, or no longer intact."""
        whole = yield PutBack()
        if self.intact and not whole:
            yield DropState()
        self.intact = self.intact and whole
        self._at_begin = True
        if self.runs_done != self._runs_at_begin:  # calls above the block will be made again
            self.runs_done, self._last_call = self._runs_at_begin, None

    def _put_back_for_retry(self) -> Steps:
        whole = yield PutBackForRetry()
        if whole or not self.intact:
            return
        yield DropState()
        self.intact = False
        raise StateTorn(
            "a worker was lost in the block, and code below it changed what is tracked in a way "
            "that no operation of torch shows (compiled code, NumPy, another thread), which it had "
            "not done before: that cannot be undone"
        )

    # ---- at a boundary

    def _be_in_current_group(self) -> Steps:
        worker = self._worker
        while self.seat is None or (worker.following and (yield from self._leaves_here())):
            if self.seat is not None:
                self.seat = None
                yield TearDown()
                yield Leave()
            yield from self._enter()

    def _leaves_here(self) -> Steps:
        """Whether to leave the group at this boundary. Waits until a provisional change is settled,
        for HOLD_S at most."""
        worker, committed = self._worker, self.progress.committed
        if worker.must_wait(committed):
            settled = yield AwaitSettlement(committed=committed, timeout_s=HOLD_S)
            if not settled:
                return True
        return worker.must_leave(committed)

    def _duties(self) -> Steps:
        yield from self._leave_job_if_told()
        if self._comparison_is_due():
            self._compare_due = False
            yield CompareReplicas()
        if self._save_owed or self._saves_here():
            yield from self._read()  # at the same boundary, whoever has saved this step already
        if self._save_is_due():
            self._save_owed, self._saved_step = False, self.progress.committed
            yield Save(progress=self.here)

    def _read(self) -> Steps:
        if self.unread:
            self.read(same=(yield CompareUnread()))

    def _comparison_is_due(self) -> bool:
        """Whether replicas are compared here: after 1, 2, 4... steps of the group, and before a
        save, since each member writes a part of what must be one state. Only the number of steps
        decides, so all members do it at the same boundary."""
        steps = self.progress.committed - self.agreed_at
        if not self._compare_due or steps <= 0:
            return False
        return steps & (steps - 1) == 0 or self._saves_here()

    def _save_is_due(self) -> bool:
        committed = self.progress.committed
        if committed == 0:
            return False
        return self._save_owed or (self._saves_here() and committed != self._saved_step)

    def _saves_here(self) -> bool:
        return self._save_every > 0 and self.progress.committed % self._save_every == 0

    def _leave_job_if_told(self) -> Steps:
        """Save and leave the job if the generation says so. Every member comes here from a boundary
        or a call, so all states are of the same place of the script: a block that was given up is
        left first."""
        if self.seat is not None and self.seat.generation.purpose is Purpose.SAVE_AND_LEAVE:
            yield SaveAndWait(progress=self.here)
            if not self._left:  # else the script is unwinding already
                self._left = True
                yield LeaveJob()

    # ---- into a group

    def _enter(self) -> Steps:
        """Join groups until the members of one have agreed on one state and all is set up."""
        while True:
            try:
                held = self.intact and not self.holds_back
                try:
                    seat = yield Join(held=held, at_begin=self._at_begin)
                finally:
                    if self._worker.is_tainted:
                        self.intact, self._counts_in = False, 0
                yield from self._agree(seat)
                self.seat = seat
                yield TellJoined(committed=self.progress.committed)
                self._begun = True
                if not self.holds_back:
                    yield from self._set_up(seat)
                    yield from self._repeat_call()
            except GroupLost as error:
                yield from self.lose(error)
                continue
            self._save_owed = seat.generation.save_first
            yield Entered()
            return

    def _agree(self, seat: Seat) -> Steps:
        """Agree with the group on one state. Raises GroupLost, StateLost or Stranded."""
        declarations, plan = yield from self._compare(seat)
        repeat_from = runs_to_repeat(declarations)
        if repeat_from is None:
            raise GroupLost("a newcomer joined while session.run() was under way")
        if seat.rank in plan.stranded:
            raise Stranded(
                "the group continues from a state that does not fit the place that this worker's "
                "script has reached; a fresh worker takes its place"
            )
        if plan.stranded:
            yield AwaitSuccessor(timeout_s=_TOLD_S)
            raise GroupLost(f"rank {plan.stranded[0]} cannot go on from the group's state")
        yield from self._carry_out(plan, seat)
        received = any(t.target == seat.rank for t in plan.transfers)
        if received or not self.took_part or plan.committed is None:
            self.runs_done, self._last_call = repeat_from, None
        self._repeat_from = repeat_from
        self._calls_of_others = calls_done(declarations)
        self._all_between = not any(d.in_block or d.in_run or d.begin_digest for d in declarations)
        self.intact = True
        self.took_part = True
        self._begun = plan.committed is not None
        self.agreed_at = self.progress.committed
        self._newcomers = any(not d.took_part for d in declarations)
        self._counts_in, self.doubtful = seat.generation.number, False
        self.reduced = self.begun = 0
        self.rhythm = Rhythm()

    def _compare(self, seat: Seat) -> Steps:
        """Return the members' declarations and what follows from them.

        Members that are all at the same step mostly hold the same state, and to read all of it
        takes time: they compare the rest later, if only it is equal so far.
        """
        whole = self._reads_whole or seat.generation.purpose is not Purpose.TRAIN
        while True:
            declarations: tuple[Declaration, ...] = yield Declare(
                mine=self._declaration(), whole=whole
            )
            reference, odd = mismatching_ranks(declarations)
            if odd:
                yield ExplainMismatch(reference=reference, odd=odd)
                yield AwaitSuccessor(timeout_s=_TOLD_S)
                raise GroupLost(f"rank {odd[0]} tracks another model and was notified")
            if (found := disagreement(declarations)) is not None:
                raise StepMisused(_explained(found, declarations))
            declarations = without_doubtful(declarations)
            self.unread = any(d.unread for d in declarations)
            if not self.unread or agree_so_far(declarations):
                return declarations, plan_recovery(declarations)
            whole = True

    def _declaration(self) -> Declaration:
        return Declaration(
            committed=self.progress.committed,
            committed_in=self.progress.committed_in,
            intact=self.intact,
            signature=0,
            took_part=self.took_part,
            in_block=self._in_block,
            loop=max(self.loop, 0),
            state_loop=self.progress.loop if self.holds_back else max(self.loop, 0),
            runs_done=self.runs_done,
            in_run=self._in_run or (self._in_block and not self._at_begin),
            repeats=self._last_call is not None,
            group=self._counts_in,
            reduced=self.reduced,
            begun=self.begun,
            doubtful=self.doubtful,
        )

    def _carry_out(self, plan: RecoveryPlan, seat: Seat) -> Steps:
        if plan.differed:
            right = plan.transfers[0].source
            yield TellDifference(ranks=plan.differed, right=right)
        if plan.committed is None and seat.rank == 0:
            yield from self._restore(seat, begun=plan.begun or seat.generation.begun)
        elif plan.committed is None and _shares_node(seat, 0):
            overwritten, self._overwritten = self._overwritten, True  # until it is known
            has_overwritten: bool = yield ReadCheckpoint(loop=max(self.loop, 0))
            self._overwritten = overwritten or has_overwritten
        receivers = {transfer.source: transfer.target for transfer in plan.transfers}
        comes = any(transfer.target == seat.rank for transfer in plan.transfers)
        for transfer in plan.transfers:
            if transfer.source == seat.rank and not comes:
                progress = self.progress if transfer.mark is Mark.COMMIT else self.here
                if self.holds_back:
                    progress = self.progress
                yield Send(rank=transfer.target, progress=progress, mark=transfer.mark)
            elif transfer.target == seat.rank:
                if self._receives_in_place:
                    if self.intact:
                        yield DropState()
                    self.intact, self._overwritten = False, True  # until all of it is here
                received: Progress = yield Receive(
                    rank=transfer.source,
                    loop=max(self.loop, 0),
                    mark=transfer.mark,
                    then=receivers.get(seat.rank),
                )
                self._take_over(received)
                self._at_begin = transfer.mark is Mark.BEGIN
                if not self._at_begin:  # until the script has come to the next boundary
                    self._worker.run_entered()

    def _restore(self, seat: Seat, *, begun: bool) -> Steps:
        """No member holds the state: rank 0 restores a checkpoint, or begins the job. A torn state
        is never taken for the initial one. Raises StateLost or Stranded."""
        overwritten, self._overwritten = self._overwritten, True  # until all of it is here
        restored: Progress | None = yield Restore(loop=max(self.loop, 0))
        if restored is None and begun:
            raise StateLost(
                "steps of the job were committed, but every worker that held its state has ended, "
                "or was interrupted while its state changed, and there is no checkpoint to go back "
                "to; start the job again as another run, with --checkpoint-dir and "
                "--checkpoint-every to keep its progress"
            )
        if restored is None and (self.took_part or overwritten):
            what = "the first step was interrupted while the state changed"
            if not self.took_part:
                what = "every member that held the job's state was lost while this worker received "
                what += "it, and there is no checkpoint"
            raise Stranded(
                f"{what}; a fresh worker takes this one's place and the job begins again"
            )
        self._take_over(replace(restored or Progress(), committed_in=seat.generation.number))

    def _take_over(self, progress: Progress) -> None:
        if self.took_part and progress.loop < self.loop:
            raise Stranded(
                f"the job goes back to loop {progress.loop + 1} over session.steps(), which this "
                f"worker's script has left for loop {self.loop + 1}; a fresh worker takes its "
                "place"
            )
        self._counts_in = 0  # this progress was not made here
        if progress.committed < self._saved_step:
            self._saved_step = -1
        self.progress = progress
        self.holds_back = progress.loop > self.loop
        self._overwritten = False

    def _set_up(self, seat: Seat) -> Steps:
        if self._batches is not None:
            self.ramps = {
                str(number): retarget(
                    self.progress.ramps.get(str(number)),
                    rule,
                    self._batches.batch_ratio(seat.generation.world_size, rule.reference_world),
                    self.progress.committed,
                )
                for number, rule in enumerate(self.rules)
            }
        yield SetUp(seat=seat)

    def _repeat_call(self) -> Steps:
        """Repeat the last call, for members that have not completed it."""
        if self._repeat_from >= self.runs_done:
            return
        require(self._repeat_from == self.runs_done - 1, "a member is two calls behind another")
        call, number = self._last_call, self._repeat_from
        require(call is not None, "a call is to be repeated by a member that has not made it")
        committed = self.progress.committed
        yield MeetForCall(committed=committed, number=number, call=call)
        yield Perform(call=call)

    def _arrive(self) -> Steps:
        yield TakePostponed()
        self.holds_back = False
        self.intact = True
        if self.seat is not None:
            yield from self._set_up(self.seat)


def _shares_node(seat: Seat, rank: int) -> bool:
    members = seat.generation.members
    return members[seat.rank].node == members[rank].node


def _explained(found: Disagreement, declarations: Sequence[Declaration]) -> str:
    def told(rank: int) -> str:
        declared = declarations[rank]
        return f"rank {rank} {declared.committed} steps with {declared.begun} begun reductions"

    some = [*found.ahead[:2], *found.odd[:2]]
    return (
        f"the members did not make the same reductions in generation {declarations[some[0]].group},"
        f" so none of their states is right: {', '.join(map(told, some))}. On every rank, each "
        "step must pass its losses through the same models, and call the same collectives; where a "
        "rank has no usable sample, multiply the loss of its batch by 0"
    )
