"""Carries out the actions of the worker's Participation, with groups, tensors and storage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic.core.data_order import SampleRange
from elastic.core.recovery import Declaration
from elastic.core.whereabouts import Place
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Participation, Progress, Steps
from elastic.worker import replicas, script_checks
from elastic.worker.compilation import COMPILATIONS
from elastic.worker.control import Control
from elastic.worker.data_loader import BatchPlan, BatchPlanner, DataLoader
from elastic.worker.group import membership
from elastic.worker.group.distributed_model import Passes
from elastic.worker.group.losses import Losses, as_loss
from elastic.worker.group.models import Models
from elastic.worker.group.outside_blocks import OutsideBlocks
from elastic.worker.group.process_group import GROUPS, Group
from elastic.worker.group.reductions import Reductions
from elastic.worker.loops import Loops
from elastic.worker.notices import Notices
from elastic.worker.optimizers import Optimizers, ScaledOptimizer
from elastic.worker.script_calls import ScriptCall, ScriptCalls
from elastic.worker.script_place import place_of_main_thread
from elastic.worker.state.backlog import LedgerRecord
from elastic.worker.state.exchange import StateExchange
from elastic.worker.state.job_state import JobState
from elastic.worker.state.state_digests import StateDigests
from elastic.worker.state.undo import Undo
from elastic.worker.state.untracked import Untracked
from elastic.worker.steps_clock import StepsClock

_ELSEWHERE_S = 0.5
"""After so many seconds in a block, a member tells those that wait for it where it is."""

_ENDS_BY_ITSELF_S = 3.0


class JobStopping(SystemExit):
    """Raised at a step boundary to leave the job. It unwinds the script."""


class Training:
    """A worker's training: the driver of its Participation, which Session and Step call."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.part = Participation(
            control.membership.machine,
            save_every=control.checkpoints.every,
            receives_in_place=control.backend.queues,
        )
        self.state = JobState(self.part)
        self.clock = StepsClock()
        self.place = self.clock.place
        self.models = Models()
        self.scaled: list[ScaledOptimizer] = []
        self.optimizers = Optimizers(self.state)
        self._membership = control.membership
        self.losses = Losses(control.membership, recovers=control.recovers)
        self._notices = Notices(control.reports, control.membership)
        self.state.values.await_state = lambda: self.part.holds_back
        self._reads = StateDigests()
        self._undo = Undo(
            self.state,
            device=control.backend.device,
            wait_for_device=control.backend.wait_for_device,
            on_costly=self._notices.copies_cost,
            on_slow=self._notices.copies_are_slow,
            before_write=self._reads.wait,
        )
        self._calls = ScriptCalls(
            self._undo, self.models, self.clock, control.membership, self.losses
        )
        self.exchange = StateExchange(
            self.state, self._undo, self._reads, control.checkpoints, control.backend
        )
        self._untracked: Untracked | None = Untracked(self.state, self._notices.untracked)
        """None after its last look."""
        self.loops = Loops(self.state)
        self.on_group_change: list[Callable[[], object]] = []
        """The script's functions to call when it has come into another group."""
        self._told_group = 0
        self.tells_group_change = False
        self.in_block = False
        """The script is inside of `with step:`."""
        self._driving = False
        self.in_backward = False
        """The script is inside of `step.backward`."""
        self.in_batches = False
        """The script is inside of a loop over `step.batches` that can have several turns."""
        self._warming_up = False
        self._undoable = False
        """The script is in a block, which certainly has not begun to update the model."""
        self._hurried_at: float | None = None
        """When the script was first found to be too late for the job's end."""
        self._left_behind: list[Passes] = []
        self.reductions = Reductions(self.models, self.part)
        self._outside = OutsideBlocks()
        self.loss_in_block: Exception | None = None
        """The error in this block that showed that the group is lost."""
        self._reduce_means: Callable[[], bool] = lambda: False
        self._carry_out = self._carriers()
        control.hand_over_state = self._hand_over_state
        control.may_stop_script = self._may_stop_script
        control.leave_early = self._leave_early
        control.reports.publish(self.state, self.clock, self._answer_calls)
        self._hooks = (
            register_optimizer_step_pre_hook(self._optimizer_steps),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        )

    # ---- what is known

    @property
    def group(self) -> Group | None:
        """The group that everything is set up for. None between two groups."""
        return self._membership.group if self.part.seat is not None else None

    # ---- the loop over the steps

    def begin_loop(
        self, data: DataLoader, epochs: int | None, max_steps: int | None = None
    ) -> None:
        """The script begins a loop that ends with so many epochs of `data`, or after so many
        committed steps of this loop: whichever comes first. None: it does not end by these."""
        script_checks.require_trained_together(self.models, self.state)
        script_checks.require_left_well(self.part)
        loader = self.loops.begin(self.part, data, epochs, max_steps)
        if self.exchange.seed is None:
            self.exchange.seed = torch.initial_seed()
            self.state.follow_rebuilt()
        self.state.loop_begins()
        self._drive(self.part.begin_loop(loader, data))

    def next_plan(self) -> tuple[BatchPlanner, BatchPlan] | None:
        """Come to the next step, and return its planner and plan. None after the last one."""
        if not self.part.passes_boundary():
            self._drive(self.part.boundary())
            if self.part.skips:
                return None
        planner = self.loops.planner
        assert planner is not None, "a boundary is left in a group"
        plan = planner.next_plan()
        if plan is None:
            return None
        if self.control.recovers:
            if self._untracked is not None:
                self._look_for_untracked(self._untracked)
            self._undo.begin()
        self.optimizers.block_begins()
        return planner, plan

    def end_loop(self) -> None:
        meet = ScriptCall(
            what="ends its loop over session.steps",
            where="",
            function=lambda: None,
            state=self._digest_to_keep,
        )
        self._drive(self.part.end_loop(meet))
        self.loops.close()

    def tell_group_change(self) -> None:
        """Between two blocks: tell the script if it is in another group than it was told last."""
        seat = self.part.seat
        if seat is not None and seat.generation.number != self._told_group:
            self._told_group = seat.generation.number
            self.tells_group_change = True
            try:
                for callback in self.on_group_change:
                    callback()
            finally:
                self.tells_group_change = False

    # ---- a step's block

    def begin_block(self, reduce_means: Callable[[], bool]) -> None:
        """The script enters `with step:`.

        reduce_means: sums values given to `step.mean`, and returns whether there were any. It is
        called before an optimizer steps: if a collective came later, each step would have to copy
        what the optimizer has changed, for the undo.
        """
        newest = self._outside.script_comes_back(self.part.progress.committed)
        lease = self.control.lease
        if not lease.holds():
            lease.wait()
        self.in_block = True
        self._reduce_means = reduce_means
        self.part.begin_block()
        self.reductions.begin_block(newest)
        self.models.begin_block()
        self.clock.in_call = True
        self.place.now = Place.FORWARD, time.monotonic()
        self.clock.begin()
        self._undoable = True

    def leave_block(self) -> None:
        self.in_block = self.in_batches = self._undoable = False
        self.models.end_block()
        self.clock.in_call = False
        self.place.now = Place.BETWEEN, time.monotonic()
        self.optimizers.block_ended()
        self.loss_in_block = None

    def before_backward(self) -> None:
        if self.control.recovers:
            self._undo.before_backward()

    def begin_backward(self, *, averages: bool) -> Reductions:
        """The script's backward pass begins. averages: it is that of the last micro-batch. Returns
        the count of reductions, for the end of such a pass."""
        self.in_backward = True
        if averages:
            self._undoable = self.optimizers.have_stepped  # else the script may update by itself
            for model in self.models:
                model.passes.begun = False  # the script may freeze or thaw parameters below it
            self.reductions.begin_pass()
        return self.reductions

    def collectives(self) -> int | None:
        """How many collectives the group has begun. None if torch does not count them."""
        group = self._membership.require_group()
        count = group.collectives()
        return count if group.counts_collectives else None

    def require_group(self) -> Group:
        """The group that this worker is in. Raises GroupLost if there is none."""
        return self._membership.require_group()

    @property
    def world_size(self) -> int:
        seat = self.part.seat
        return seat.generation.world_size if seat is not None else 1

    def wait_for_reduction(self, newest: int | None = None) -> None:
        """Return when the reductions begun so far are known to be complete. Raises GroupLost.

        newest: the number of collectives that the group itself has begun, if it is known already.

        With gloo the backward pass itself returns only then, and this costs nothing. With NCCL
        reductions are queued on the device: without this wait, one that was aborted would raise
        only after the optimizer has used its gradients.
        """
        group = self._membership.require_group()
        group.settle()
        if self.part.unread:
            self._read_rest()
        if self.control.recovers:
            if newest is None or len(GROUPS) > 1:
                newest = group.collectives()
            seen = self.clock.collectives_reduced = newest
            self._undo.reduced(seen)

    def all_reduce(self, values: torch.Tensor) -> dist.Work | None:
        """Begin to sum `values` over the members, in place. Returns the work to wait for."""
        work: dist.Work | None = dist.all_reduce(values, async_op=True)
        return work

    def commit(self, samples: SampleRange, means: Mapping[str, float]) -> None:
        """The block has ended without an error: commit its step."""
        self.reductions.end_block()
        part = self.part
        if part.begun == part.reduced:
            self.reductions.refuse_commit()
        if part.made != part.rhythm.expected:
            self._compare_reductions()
        if part.unread:
            self._read_rest()
        lease = self.control.lease
        if not lease.holds():
            lease.wait()
        recovers = self.control.recovers
        collectives = self._outside.script_goes_on(self._outside.group)
        later = recovers and self._undo.collectives_since_reduction(collectives)
        if later:
            self._membership.require_group().settle()
        if self._calls.last is not None:
            self._calls.committed()
        if means or self.state.means:
            self.state.means.load_state_dict(means)
        self.part.commit(samples)
        progress = self.part.progress
        lease.note_commit(progress.committed_in, progress.committed)
        if recovers:
            self._undo.end(collectives_since_reduction=later)
        if self.control.keeps_ledger:
            self.state.ledger.append(self._record(samples))
        self.clock.commit(len(samples), progress.committed)
        self.control.reports.committed()

    def give_up_block(self, error: Exception) -> bool:
        """The group was lost in the block: join the next one. Returns whether the step counts."""
        for scaled in self.scaled:
            scaled.restore()
        counts: bool = self._drive(self.part.give_up_block(as_loss(error)))
        if not counts:
            self.clock.given_up += 1
        self.control.reports.given_up(counts=counts)
        return counts

    def note_failure(self, error: Exception) -> None:
        """A forward or backward pass raised `error`. If it shows that the group is lost, remember
        it: the script may catch it to skip a batch, but the group stays lost."""
        if self.in_block and self.losses.is_loss(error):
            self.loss_in_block = error

    # ---- reductions

    def _compare_reductions(self) -> None:
        """The block has made other reductions than the steps before let expect: raise StepMisused
        if the other members have not made the same. If the group is lost meanwhile, the
        step counts with a doubt: all of this rank's reductions are complete, and the optimizer has
        used them."""
        group = self._membership.require_group()
        try:
            membership.compare_reductions(group, self.standing(), self.part.made)
        except Exception as error:
            if not self.losses.is_loss(error):
                raise
            self.part.doubtful = True

    def standing(self) -> membership.Standing:
        """How far this member is in its group."""
        return membership.Standing(
            committed=self.part.progress.committed,
            in_block=self.in_block and not self._driving,
            reductions=self.part.begun + self.reductions.under_way(),
            collectives=self.reductions.collectives(),
        )

    # ---- calls outside of steps

    def call(self, call: ScriptCall) -> Any:
        return self._drive(self.part.run(call))

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Call `function` and undo what it changes. Its compilation counts as part of start-up."""
        COMPILATIONS.watch()
        self._undo.begin()
        self._warming_up = True
        try:
            function()
        finally:
            self._warming_up = False
        self._undo.put_back()

    # ---- the end

    def finish(self, where: str = "") -> None:
        """The script has ended: wait until every member's has ended and the result is saved.

        where: file and line of its sys.exit(), if that has ended it. Raises ConfigurationError if
        the script has not trained or has too few loops for the state, StepMisused if it left its
        loop with a step that does not count.
        """
        script_checks.require_complete(self.part)
        self.call(self._end_of_script(where))
        self.clock.spent.settle(time.monotonic())
        self.loops.close()
        self.control.finish()

    def close(self) -> None:
        """Leave the group and all optimizers, for another session in this process."""
        for hook in self._hooks:
            hook.remove()
        for model in self.models:
            model.unwrap()
        self.loops.close()
        if self._membership.group is not None:
            self._membership.leave()

    def _end_of_script(self, where: str = "") -> ScriptCall:
        return ScriptCall(
            what="ends the script",
            where=where,
            function=self._save_and_wait,
            state=lambda: self._digest_to_keep() if self._saves_here() else "",
        )

    def _digest_to_keep(self) -> str:
        saves = self.control.checkpoints.has_directory
        return replicas.digest_to_keep(self._membership.require_group(), self.state, saves=saves)

    # ---- driving the protocol

    def _carriers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            act.Join: self._join,
            act.Declare: self._declare,
            act.ExplainMismatch: self._explain_mismatch,
            act.DropState: lambda _: self._membership.drop_state(),
            act.Send: lambda a: self.exchange.send(a, self._membership.require_group()),
            act.Receive: self._receive,
            act.Restore: lambda a: self.exchange.restore(a, self._membership.require_group()),
            act.ReadCheckpoint: lambda a: self.exchange.read_checkpoint(
                a, self._membership.require_group()
            ),
            act.TakePostponed: lambda _: self.exchange.take_postponed(),
            act.TellDifference: self._tell_difference,
            act.SetUp: self._set_up,
            act.TearDown: self._tear_down,
            act.TellJoined: lambda a: self._membership.joined(a.committed),
            act.Entered: self._entered,
            act.Leave: lambda _: self._membership.leave(),
            act.Break: lambda a: self._membership.report_loss(a.error, held=a.held),
            act.AwaitSettlement: lambda a: self._membership.await_settlement(
                a.committed, a.timeout_s
            ),
            act.AwaitSuccessor: lambda a: self._membership.await_successor(a.timeout_s),
            act.PutBack: self._put_back,
            act.KeepForRetry: lambda _: self._undo.keep_for_retry(),
            act.PutBackForRetry: lambda _: self._undo.put_back_for_retry(),
            act.CompareReplicas: self._compare_replicas,
            act.CompareUnread: self._compare_unread,
            act.Save: self._save,
            act.SaveAndWait: lambda _: self._save_and_wait(insists=True),
            act.LeaveJob: self._leave_job,
            act.MeetForCall: self._meet_for_call,
            act.Perform: self._perform_call,
        }

    def _drive(self, protocol: Steps) -> Any:
        """Carry out the actions that the protocol yields, until it returns. Returns its result."""
        resume: Callable[[Any], act.Action] = protocol.send
        value: Any = None
        acted = False
        self._driving = True
        self.place.now = Place.BOUNDARY, time.monotonic()
        try:
            while True:
                try:
                    action = resume(value)
                except StopIteration as end:
                    return end.value
                if not acted:  # later, the collectives may be those of actions
                    acted = True
                    self._outside.script_comes_back(self.part.progress.committed)
                try:
                    resume, value = protocol.send, self._carry_out[type(action)](action)
                except Exception as error:  # noqa: BLE001 - the protocol decides what follows
                    resume = protocol.throw
                    value = as_loss(error) if self.losses.is_loss(error) else error
        finally:
            self._driving = False
            self.place.now = Place.BETWEEN, time.monotonic()
            if acted:
                self._outside.script_goes_on(self._membership.group)

    def _end_script(self) -> None:
        """This thread takes over the state for good from that of the script."""
        self._left_behind = [model.leave_behind() for model in self.models]
        self.losses.script_is_over = True

    def _hand_over_state(self) -> None:
        """Give the state to the next group before the process ends: the script's thread does not
        return from a group that was aborted. Runs on a thread of its own."""
        if self.in_block and not self._driving and not self.losses.script_is_over:
            self._end_script()
            self._drive(self.part.hand_over_state())

    def _may_stop_script(self) -> bool:
        """Whether the script's thread may be stopped for good where it is, because the job stops
        and has no time left for it. That thread asks, or another one that looks at it.

        At once in a block that can be undone, since its group is gone. Past that the coordinator
        decides how long the others wait for it. Elsewhere the script gets `_ENDS_BY_ITSELF_S` to
        come to the boundary by itself.
        """
        if not self._membership.machine.is_out_of_time or self.losses.script_is_over:
            return False
        now = time.monotonic()
        if self._hurried_at is None:
            self._hurried_at = now
        in_protocol = self._driving and self._calls.under_way is None
        if in_protocol or (self.in_block and not self._undoable):
            return False
        return self.in_block or now - self._hurried_at >= _ENDS_BY_ITSELF_S

    def _leave_early(self) -> bool:
        """Save the state from before what the script's thread does, which has stopped for good, and
        leave the job. Runs on a thread of its own. Returns False if that state cannot be saved."""
        self._end_script()
        self.control.backend.wait_for_device()
        before: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._driving:
            whole = self._undo.put_back_call()
        elif self.part.at_begin:  # `leave_early` puts back
            whole = not self.part.last_block_discarded
        elif whole := not self.part.holds_back and self._undo.holds_commit:
            before = self._undo.as_of_commit()
        self._tell_left_early(whole)
        with before:
            if not self._drive(self.part.leave_early(self._end_of_script(), whole=whole)):
                return False
            self.clock.spent.settle(time.monotonic())
            self.control.finish()
            return True

    def _tell_left_early(self, whole: bool) -> None:
        within = "the block of" if self.in_block else "the code before"
        if self._driving:
            within = "session.run before"
        self._notices.left_early(
            self.part.progress.committed,
            within=within,
            place=place_of_main_thread()[0],
            lasts_s=self.clock.in_step_s() or time.monotonic() - self.place.now[1],
            undone=whole,
        )

    # ---- into a group

    def _join(self, join: act.Join) -> act.Seat:
        """Join a group. Meanwhile, read the state for its digests, which takes milliseconds."""
        if join.held and not self._reads.begun:  # an earlier attempt may have left them
            self._reads.begin(self.state, self._undo, at_begin=join.at_begin)
        self.place.now = Place.JOINING, time.monotonic()
        group = self.control.join()
        return act.Seat(generation=group.generation, rank=group.rank)

    def _declare(self, declare: act.Declare) -> tuple[Declaration, ...]:
        self.exchange.begin()
        commit, begin, unread = self._reads.digests(whole=declare.whole)
        mine = replace(
            declare.mine,
            signature=self.state.signature(),
            commit_digest=commit,
            begin_digest=begin,
            unread=unread,
        )
        return membership.declare(self._membership.require_group(), mine)

    def _explain_mismatch(self, mismatch: act.ExplainMismatch) -> None:
        membership.explain_mismatch(
            self._membership.require_group(),
            mismatch.reference,
            mismatch.odd,
            self.state.common(),
        )

    def _tell_difference(self, difference: act.TellDifference) -> None:
        names = replicas.names_that_differ(
            self._membership.require_group(),
            self.state,
            odd=difference.ranks,
            right=difference.right,
        )
        if names is not None:
            self._notices.state_differed(self.part.progress.committed, names)

    def _receive(self, receive: act.Receive) -> Progress:
        group = self._membership.require_group()
        return self.exchange.receive(receive, group, survives=self.part.took_part)

    def _set_up(self, _: act.SetUp) -> None:
        if self.losses.script_is_over:
            return  # this process will not train any more
        self.clock.setup_began()
        self.loops.close()
        self.reductions.follow(self._membership.require_group())
        caches = self.state.buffers.caches_of_group()
        for model in self.models:
            model.wrap(self.control.backend, caches)
        if self.control.recovers and not self.control.backend.queues:
            # On a device, gradients are only queued when the hook is called.
            parameters = [p for model in self.models for p in model.passes.parameters]
            self.clock.pace.arrival.watch(parameters)
        group = self._membership.require_group()
        self.loops.plan_for(group, self.part, self.models)
        self.clock.collectives_reduced = group.collectives()
        self.clock.setup_ended()

    def _tear_down(self, _: act.TearDown) -> None:
        self.clock.interrupt()
        self.reductions.leave()
        for model in self.models:
            model.unwrap()
        self.loops.close()

    def _entered(self, _: act.Entered) -> None:
        if self.part.unread:
            self._reads.script_goes_on()
        else:
            self._reads.forget()
        self.place.now = Place.BOUNDARY, time.monotonic()
        group, took = self._membership.require_group(), self._membership.durations
        self.clock.entered(
            group.generation.number,
            join_s=took.join_s,
            sync_s=took.sync_s,
            world_size=group.world_size,
        )
        self.control.reports.entered(group, self.exchange.outcome)

    # ---- state

    def _put_back(self, _: act.PutBack) -> bool:
        for model in self.models:
            model.unwrap()
        self._reads.forget()  # the block may have changed what was not to change
        return self._undo.put_back()

    def _compare_replicas(self, _: act.CompareReplicas) -> None:
        group = self._membership.require_group()
        if group.world_size == 1:
            return
        committed, every = self.part.progress.committed, self.control.checkpoints.every
        saves = every > 0 and committed % every == 0
        self._reads.look_up_unwritten(self._undo)
        with self.clock.waiting():  # the coordinator looks for a cut link only where members wait
            replicas.require_same_order(group, self.standing(), self.loops.order)
            replicas.require_equal(group, self.state, self._reads.before, saves=saves)

    def _compare_unread(self, _: act.CompareUnread) -> bool:
        group, here = self._membership.require_group(), self.standing()
        with self.clock.waiting():
            return replicas.have_equal_rest(group, here, self.state, self._reads)

    def _read_rest(self) -> None:
        """Before the block changes what the group has not compared: do so. Raises GroupLost if
        members differ."""
        try:
            self.part.read(same=self._compare_unread(act.CompareUnread()))
        except Exception as error:
            self.note_failure(error)
            raise

    def _saves_here(self) -> bool:
        """Whether the state as it is now would be saved by `_save_and_wait`."""
        step = self.part.progress.committed
        group, began_at = self._membership.require_group(), self.part.agreed_at
        checkpoints = self.control.checkpoints
        return not checkpoints.is_committed(step) and checkpoints.saves(
            step, group, began_at=began_at
        )

    def _save(self, _: act.Save) -> None:
        self.place.now = Place.SAVING, time.monotonic()
        began = time.monotonic()
        self.control.checkpoints.save(
            self.state, self._membership.require_group(), began_at=self.part.agreed_at
        )
        self.clock.saved(began)
        self.place.now = Place.BOUNDARY, time.monotonic()

    def _save_and_wait(self, *, insists: bool = False) -> None:
        self.place.now = Place.SAVING, time.monotonic()
        began = time.monotonic()
        try:
            self.control.checkpoints.save_and_wait(
                self.state,
                self._membership.require_group(),
                self._membership.must_leave,
                began_at=self.part.agreed_at,
                insists=insists,
            )
        finally:
            self.clock.saved(began)
        self.place.now = Place.BOUNDARY, time.monotonic()

    def _leave_job(self, _: act.LeaveJob) -> None:
        self.clock.spent.settle(time.monotonic())
        raise JobStopping(0)

    # ---- calls

    def _meet_for_call(self, meeting: act.MeetForCall) -> None:
        with self.clock.waiting():
            self.place.now = Place.MEETING, time.monotonic()
            group = self._membership.require_group()
            call: ScriptCall = meeting.call
            repeats = meeting.number < self.part.runs_done  # and the script has gone on since
            state = "" if repeats else call.state()
            if membership.meet(group, self.standing(), str(meeting.number), call, state):
                saves = self.control.checkpoints.has_directory
                replicas.require_equal(group, self.state, saves=saves)

    def _perform_call(self, perform: act.Perform) -> Any:
        self._reads.forget()  # the call may change what is being read
        return self._calls.perform(perform.call)

    def _answer_calls(self) -> None:
        """On the reporting thread: tell members that wait for this one where it is, if it will not
        come to them."""
        group = self._membership.group
        if group is None or not self.in_block or self.clock.in_step_s() < _ELSEWHERE_S:
            return
        where, waits = place_of_main_thread()
        doing = f"inside the block of step {self.part.progress.committed} at {where}"
        membership.answer(group, self.standing(), doing, waits=waits)

    # ---- what optimizers do

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.in_backward:
            script_checks.refuse_step_in_backward(optimizer)
        self._undoable = False
        if not self.in_block:
            if self.part.loop < 0 and not self._warming_up:
                script_checks.refuse_step_above_loop(optimizer)
            self.optimizers.steps_below(optimizer)
        elif self.loss_in_block is not None:
            raise self.loss_in_block  # which the script has caught, as to skip a bad batch
        elif self.in_batches:
            script_checks.refuse_step_between_batches(optimizer)
        else:
            part = self.part
            if part.made and part.begun == part.reduced:
                self.reductions.refuse_step_of(optimizer)
            if self._reduce_means():
                self.wait_for_reduction()
            if part.unread:
                self._read_rest()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.in_block:
            self.optimizers.count(optimizer)
        elif self.optimizers.stepped(optimizer):
            for model in self.models:
                model.require_same_layers()

    def _look_for_untracked(self, untracked: Untracked) -> None:
        if untracked.step_begins() and self._membership.require_group().rank == 0:
            with contextlib.suppress(Exception):  # odd objects must not end the training
                untracked.look()
        if untracked.is_over:
            self._untracked = None

    def _record(self, samples: SampleRange) -> LedgerRecord:
        group = self._membership.require_group()
        return LedgerRecord(
            step=self.part.progress.committed - 1,
            epoch=samples.epoch,
            generation=group.generation.number,
            world_size=group.world_size,
            start=samples.start,
            stop=samples.stop,
            run=group.generation.incarnation,
            loader=self.part.loader,
        )
