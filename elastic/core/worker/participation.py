"""The script's way through the groups of a job: joins, agrees, trains, commits, and starts over.

A protocol without I/O. Each method that a script's call leads to is a generator: it yields the
actions below for its driver to carry out, and is resumed with their results, until it returns. The
driver throws `GroupLost` into it where an action ends with the loss of the group ("Raises
GroupLost"). In production the session drives it, with processes and tensors; the simulator drives
the same code.

What a member holds, and when it may be trusted:

- `progress` is replaced as a whole, by a commit or by what another member or storage gives.
- What follows from the last commit and the generation (the ramps of the learning rate) is derived
  anew in every group and is kept only with the next commit, so it cannot differ between members.
- `intact`: the tracked state is exactly that of `progress.committed` steps. It ends where another
  state begins to overwrite it, or where a block that was given up could not be undone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
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
    calls_done,
    odd_ones_out,
    plan_recovery,
    runs_to_repeat,
)
from elastic.core.worker.machine import HOLD_S, Worker
from elastic.errors import GroupLost, StateLost, StateTorn, Stranded

Call: TypeAlias = Any
"""What is called: the driver's own."""
Ramps: TypeAlias = Mapping[str, Ramp]
NO_RAMPS: Ramps = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the job is: what the session itself adds to the tracked state.

    committed: steps of the job. committed_in: the generation that committed the last one.
    loop: the script's loop over `session.steps` that it was in, from 0. positions: how far each
    loader is, by the order in which the script first used them. ramps: of the learning rates, by
    the number of the scaled optimizer.
    """

    committed: int = 0
    committed_in: int = 0
    loop: int = 0
    positions: tuple[DataPosition, ...] = ()
    ramps: Mapping[str, Ramp] = field(default_factory=lambda: NO_RAMPS)

    def position(self, loader: int) -> DataPosition:
        """How far the loader with this number is."""
        return self.positions[loader] if loader < len(self.positions) else DataPosition()

    def after(
        self, samples: SampleRange, *, loader: int, loop: int, generation: int, ramps: Ramps
    ) -> Progress:
        """After one more step, which consumed `samples` of `loader`."""
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
    """Wait for a generation to join, and build its group; meanwhile take the digests that
    `Declare` needs. Returns a Seat; raises GroupLost.

    held: this member holds a whole state. at_begin: it is at the begin mark.
    """

    held: bool
    at_begin: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Declare:
    """Give `mine` to every member, with the digests filled in. Returns all declarations, by rank;
    raises GroupLost."""

    mine: Declaration


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainMismatch:
    """Rank `reference` tells the `odd` ranks what it tracks; these raise ModelMismatch."""

    reference: int
    odd: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DropState:
    """The state of another member is about to overwrite this one's, or a block could not be undone:
    no longer count on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send the tracked state as of `mark`, and `progress`, to `rank`. Raises GroupLost."""

    rank: int
    progress: Progress
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Receive:
    """Take over what `rank` sends; returns its progress. A state of a later loop than `loop` is
    held back until `TakeHeld`. Raises GroupLost."""

    rank: int
    loop: int
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Load the newest checkpoint; returns its progress, None if there is none. A state of a later
    loop than `loop` is held back until `TakeHeld`."""

    loop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeHeld:
    """The script has come to the loop of the state that was held back: put it in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellDifference:
    """Members of one step held different states; `ranks` take over that of `right`."""

    ranks: tuple[int, ...]
    right: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """The members have one state: wrap the models, plan the batches."""

    seat: Seat


@dataclass(frozen=True, kw_only=True, slots=True)
class TearDown:
    """The group is gone, or about to be: unwrap the models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellJoined:
    """Report that this member trains in the group of its seat."""

    committed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """Everything is set up: report how the group was formed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """Close the group in good order and say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """Close the lost group at once, so that its other members are freed too, and say so."""

    error: GroupLost
    held: bool
    """The state is whole, and so worth being asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitSettlement:
    """Wait until a planned change is settled. Returns False after `timeout_s`."""

    committed: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitSuccessor:
    """Wait until a generation that follows this group's is announced, or `timeout_s` is
    over."""

    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBack:
    """Undo what a block has changed. Returns whether the state is that of its begin again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepForRetry:
    """The block does not count, yet the script runs what stands below it: remember the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBackForRetry:
    """The same step is about to be handed out again: undo what the script did since then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareReplicas:
    """Compare the parameters of all members; raises GroupLost, or an error that names those that
    differ although nothing was ever lost between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Begin to save this member's share, in the background."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveAndWait:
    """Save, and wait until the checkpoint is settled; raises GroupLost if the group is superseded
    meanwhile."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveJob:
    """The job is to be left here: raises what unwinds the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetForCall:
    """Wait until every member has come to call `number` since the last commit, and compare what
    they call. Raises GroupLost, or an error that names both if they differ."""

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
    | TakeHeld
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
    | Save
    | SaveAndWait
    | LeaveJob
    | MeetForCall
    | Perform
)

Steps: TypeAlias = Generator[Action, Any, Any]

_TOLD_S = 1.0
"""Seconds that members leave a group standing in which another one cannot go on. That member may
not have received all declarations yet: if the others closed their connections at once, it would
never learn that it has to make room, and the same members would meet again and again."""


class Batches(Protocol):
    """What the protocol must know of a loop's loader."""

    def batch_ratio(self, world_size: int, reference_world: int) -> float:
        """How many times larger the global batch is than with `reference_world` workers."""
        ...


class Participation:
    """One worker's part in the job, seen from its script.

    worker: the membership machine, which this protocol only asks. save_every: committed steps
    between two checkpoints; 0 for none. receives_in_place: a state that is received overwrites the
    own one from its first byte on, where there is no room for both.
    """

    def __init__(
        self, worker: Worker, *, save_every: int = 0, receives_in_place: bool = True
    ) -> None:
        self._worker = worker
        self._receives_in_place = receives_in_place
        self._save_every = save_every
        self.progress = Progress()
        self.seat: Seat | None = None
        """Where everything is set up; None between two groups."""
        self.intact = False
        self.took_part = False
        self.loop = -1
        """The script's loop over `session.steps` that it is in or was in last, from 0."""
        self.loader = 0
        self.ramps: Ramps = NO_RAMPS
        """The ramps in force here; the job has them from the next commit on."""
        self.rules: list[ScalingRule] = []
        self.holds_back = False
        """A state of a later loop waits until the script has come to it."""
        self.runs_done = 0
        self._runs_at_begin = 0
        """The calls that were done as the step was handed out."""
        self._batches: Batches | None = None
        self._last_call: Call = None
        self._in_run = False
        self._in_block = False
        self._at_begin = False
        self._void = False
        self._overwritten = False
        self._begun = False
        """A group has begun with the state: it was not restored for one that was lost at once."""
        self._saved_step = -1
        self._save_owed = False
        self._compare_due = False
        self._agreed_at = 0
        self._newcomers = False
        self._repeat_from = 0
        self._calls_of_others = 0
        """Calls since the last commit that another member has completed."""
        self._left = False

    @property
    def here(self) -> Progress:
        """The progress, as of this place of the script: a loop may have begun since the commit."""
        loop = max(self.loop, 0)
        return self.progress if loop == self.progress.loop else replace(self.progress, loop=loop)

    @property
    def void(self) -> bool:
        """The block that the script has left last does not count: what it does until the same step
        is handed out again is undone."""
        return self._void

    @property
    def owes_step(self) -> bool:
        """The script's last block does not count, or was left by an exception: it has to come to
        the next boundary before anything else."""
        return self._void or self._in_block

    @property
    def skips(self) -> bool:
        """The job is past the script's present loop."""
        return self.holds_back and self.progress.loop > self.loop

    @property
    def _is_behind(self) -> bool:
        """The scripts of the others are at a later place: of a later loop, or past a call that this
        one has not come to."""
        return self.holds_back or self.runs_done < self._calls_of_others

    # ---- what the script does

    def begin_loop(self, loader: int, batches: Batches) -> Steps:
        """The script begins its next loop, over the loader with this number."""
        self.loop += 1
        self.loader, self._batches = loader, batches
        try:
            if self.seat is None:
                if not self.took_part:
                    yield from self._enter()
            elif not self.holds_back:
                yield from self._set_up(self.seat)
            if self.holds_back and self.progress.loop <= self.loop:
                require(self.progress.loop == self.loop, "a loop was passed over")
                yield from self._arrive()
        except GroupLost as error:  # while everything was set up; the boundary joins the next
            yield from self.lose(error)

    def passes_boundary(self) -> bool:
        """Between two steps: be at the next one if nothing is to be done before it, which is the
        usual case. False: `boundary` does what there is."""
        seat = self.seat
        if (
            seat is None
            or seat.generation.purpose is not Purpose.TRAIN
            or self._void
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
        """Between two steps: change the group if it was superseded, join if there is none."""
        while True:
            try:
                if self._void:
                    self._void = False
                    yield PutBackForRetry()
                self._at_begin = True
                if self.seat is None or self._worker.following is not None:  # seldom
                    yield from self._be_in_current_group()
                if not self._is_behind:  # else the others have these behind them
                    yield from self._duties()
            except GroupLost as error:
                yield from self.lose(error)
                continue
            self._runs_at_begin = self.runs_done
            return

    def end_loop(self, meet: Call) -> Steps:
        """No step is left in the loop: meet at its end, since a member that is a step behind still
        needs another's state; and begin to save the result, whatever the interval between
        checkpoints."""
        if self.holds_back:
            return
        behind = (yield from self._run(meet))[1]
        if self.progress.committed > 0 and not behind:  # else others save at a later place
            yield Save(progress=self.here)

    def begin_block(self) -> None:
        """The script enters the block of a step."""
        self._in_block = True

    def commit(self, samples: SampleRange) -> None:
        """The block has ended: its step counts."""
        require(self.seat is not None and self.intact, "a step was committed without a group")
        assert self.seat is not None
        self.progress = self.progress.after(
            samples,
            loader=self.loader,
            loop=self.loop,
            generation=self.seat.generation.number,
            ramps=self.ramps,
        )
        self._in_block = self._at_begin = False
        self.runs_done, self._last_call = 0, None
        self._calls_of_others = 0
        self._compare_due = True
        self._worker.committed(self.progress.committed)

    def give_up_block(self, error: GroupLost) -> Steps:
        """The group was lost inside the block. Returns whether its step counts all the same,
        because others have completed it and this member has received their state."""
        index = self.progress.committed
        yield from self._put_back()
        yield from self.lose(error)
        yield from self._enter()
        self._in_block = False
        self._worker.run_left()
        counts = self.progress.committed > index and not self._at_begin
        if not counts:
            self._void = True
            yield KeepForRetry()
        return counts

    def bequeath(self) -> Steps:
        """The script's thread stands in this block for good. Take the state back to the block's
        begin and into the next group of several, since nobody else may hold it; the worker ends
        then."""
        yield from self._put_back()
        while True:
            yield from self.lose(GroupLost("the script's thread stands still in a lost group"))
            if not self.intact:
                return
            yield from self._enter()
            if self.seat is not None and self.seat.generation.world_size > 1:
                return
            yield AwaitSuccessor()

    def run(self, call: Call) -> Steps:
        """Make a call with the other members, in the next group if this one is lost. Returns its
        result."""
        return (yield from self._run(call))[0]

    def _run(self, call: Call) -> Steps:
        """Returns the result, and whether others had completed the call before."""
        if self.holds_back:
            raise Stranded(
                f"the job is at loop {self.progress.loop} over session.steps(), and this worker's "
                f"script calls session.run() in loop {self.loop}; a fresh worker takes its place"
            )
        self._in_run, self._at_begin = True, False
        self._worker.run_entered()
        try:
            while True:
                try:
                    if self.seat is None:
                        yield from self._enter()
                    if self._void and self._newcomers:
                        raise GroupLost("a newcomer does not come to the calls of a lost block")
                    behind = self._is_behind
                    if not behind:  # else the others are to leave from a later place
                        yield from self._leave_job_if_told()
                    committed = self.progress.committed
                    yield MeetForCall(committed=committed, number=self.runs_done, call=call)
                    self._last_call = None  # all have completed it, and this one changes the state
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
        """The group is lost."""
        self.seat = None
        yield TearDown()
        yield Break(error=error, held=self.intact and self._begun)

    def _put_back(self) -> Steps:
        """Undo the block: the state is that of its begin, or it is to be counted on no longer."""
        whole = yield PutBack()
        if self.intact and not whole:
            yield DropState()
        self.intact = self.intact and whole
        self._at_begin = True
        if self.runs_done != self._runs_at_begin:  # calls above the block: they are made again
            self.runs_done, self._last_call = self._runs_at_begin, None

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
        """Is the group to be left now? Waits while that is being settled."""
        worker, committed = self._worker, self.progress.committed
        if worker.holds(committed):
            settled = yield AwaitSettlement(committed=committed, timeout_s=HOLD_S)
            if not settled:
                return True
        return worker.must_leave(committed)

    def _duties(self) -> Steps:
        yield from self._leave_job_if_told()
        if self._comparison_is_due():
            self._compare_due = False
            yield CompareReplicas()
        if self._save_is_due():
            self._save_owed, self._saved_step = False, self.progress.committed
            yield Save(progress=self.here)

    def _comparison_is_due(self) -> bool:
        """After 1, 2, 4... steps of the group, and before a save, since each member writes a part
        of what must be one state. Nothing but the steps decides: all members come to it."""
        steps = self.progress.committed - self._agreed_at
        if not self._compare_due or steps <= 0:
            return False
        return steps & (steps - 1) == 0 or self._saves_here()

    def _save_is_due(self) -> bool:
        committed = self.progress.committed
        if committed == 0:
            return False
        return self._save_owed or (self._saves_here() and committed != self._saved_step)

    def _saves_here(self) -> bool:
        """The interval between checkpoints ends at this step."""
        return self._save_every > 0 and self.progress.committed % self._save_every == 0

    def _leave_job_if_told(self) -> Steps:
        """Every member comes here from a boundary or a call, so that their states are of one
        place of the script: a block that was given up is left first."""
        if self.seat is not None and self.seat.generation.purpose is Purpose.SAVE_AND_LEAVE:
            yield SaveAndWait(progress=self.here)
            if not self._left:  # else the script is being unwound
                self._left = True
                yield LeaveJob()

    # ---- into a group

    def _enter(self) -> Steps:
        """Be in a group whose members have come to one state, with everything set up."""
        while True:
            try:
                held = self.intact and not self.holds_back
                seat = yield Join(held=held, at_begin=self._at_begin)
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
        """Come to one state with the group."""
        declarations: tuple[Declaration, ...] = yield Declare(mine=self._declaration())
        reference, odd = odd_ones_out(declarations)
        if odd:
            yield ExplainMismatch(reference=reference, odd=odd)
            yield AwaitSuccessor(timeout_s=_TOLD_S)
            raise GroupLost(f"rank {odd[0]} tracks another model and was told so")
        repeat_from = runs_to_repeat(declarations)
        if repeat_from is None:
            raise GroupLost("a newcomer joined while session.run() was under way")
        plan = plan_recovery(declarations)
        if seat.rank in plan.stranded:
            raise Stranded(
                "the group goes on from a state that does not fit the place that this worker's "
                "script is at; a fresh worker takes its place"
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
        self.intact = True
        self.took_part = True
        self._begun = plan.committed is not None
        self._agreed_at = self.progress.committed
        self._newcomers = any(not d.took_part for d in declarations)

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
        )

    def _carry_out(self, plan: RecoveryPlan, seat: Seat) -> Steps:
        if plan.differed:
            right = plan.transfers[0].source
            yield TellDifference(ranks=plan.differed, right=right)
        if plan.committed is None and seat.rank == 0:
            yield from self._restore(seat, begun=plan.begun)
        for transfer in plan.transfers:
            if transfer.source == seat.rank:
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
                    rank=transfer.source, loop=max(self.loop, 0), mark=transfer.mark
                )
                self._take_over(received)
                self._at_begin = transfer.mark is Mark.BEGIN
                if not self._at_begin:  # until the script has come to the next boundary
                    self._worker.run_entered()

    def _restore(self, seat: Seat, *, begun: bool) -> Steps:
        """Nobody holds the state. A torn one is never taken for the initial one."""
        restored: Progress | None = yield Restore(loop=max(self.loop, 0))
        if restored is None and begun:
            raise StateLost(
                "every member that held the job's state was lost, or was interrupted while its "
                "state changed, and there is no checkpoint to go back to; start the job again, "
                "with --checkpoint-dir to keep its progress"
            )
        if restored is None and (self.took_part or self._overwritten):
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
                f"the job goes back to loop {progress.loop} over session.steps(), which this "
                f"worker's script has left for loop {self.loop}; a fresh worker takes its place"
            )
        if progress.committed < self._saved_step:
            self._saved_step = -1
        self.progress = progress
        self.holds_back = progress.loop > self.loop
        self._overwritten = False

    def _set_up(self, seat: Seat) -> Steps:
        """What the generation derives from the last commit, and what the driver must set up."""
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
        """Make the last call once more, for members that have not completed it."""
        if self._repeat_from >= self.runs_done:
            return
        require(self._repeat_from == self.runs_done - 1, "a member is two calls behind another")
        call, number = self._last_call, self._repeat_from
        require(call is not None, "a call is to be repeated by a member that has not made it")
        committed = self.progress.committed
        yield MeetForCall(committed=committed, number=number, call=call)
        yield Perform(call=call)

    def _arrive(self) -> Steps:
        """The script has come to the job's loop."""
        yield TakeHeld()
        self.holds_back = False
        self.intact = True
        if self.seat is not None:
            yield from self._set_up(self.seat)
