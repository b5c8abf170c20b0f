"""Carries out the actions of the worker's Participation, with groups, tensors and storage."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic.checkpoint import documents
from elastic.checkpoint.documents import Json
from elastic.core.data_order import SampleRange
from elastic.core.membership import Purpose
from elastic.core.recovery import Declaration, Mark
from elastic.core.whereabouts import Place
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Participation, Progress, Steps
from elastic.errors import ConfigurationError, GroupLost, StateTorn, StepMisused, Stranded
from elastic.runtime.stack_file import stacks_of_threads
from elastic.worker.compilation import COMPILATIONS
from elastic.worker.control import Control
from elastic.worker.data_loader import BatchPlan, BatchPlanner, DataLoader
from elastic.worker.group import membership
from elastic.worker.group.distributed_model import DistributedModel, Passes
from elastic.worker.group.process_group import GROUPS, Group, is_group_loss
from elastic.worker.group.reductions import Reductions
from elastic.worker.group.transfer import (
    receive_json,
    receive_tensors,
    send_json,
    send_tensors,
)
from elastic.worker.optimizers import Optimizers, ScaledOptimizer, require_same_kind
from elastic.worker.state.backlog import LedgerRecord
from elastic.worker.state.checkpointing import NotNeeded, Structure
from elastic.worker.state.digest import digest_of
from elastic.worker.state.generators import Noise, seed_at
from elastic.worker.state.job_state import JobState, progress_of
from elastic.worker.state.state_digests import StateDigests
from elastic.worker.state.tensor_specs import describe, from_table, to_table
from elastic.worker.state.tree import unflatten
from elastic.worker.state.undo import Learnt, Undo
from elastic.worker.state.untracked import Untracked
from elastic.worker.steps_clock import StepsClock

_ELSEWHERE_S = 0.5
"""After so many seconds in a block, a member tells those that wait for it where it is."""

_LEASE_LOOK_S = 0.01
_ENDS_BY_ITSELF_S = 3.0
_WAITS = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/torch/autograd/",
    "/elastic/worker/group/distributed_model.py",  # agrees on buckets, too
)
_DEEPEST_CAUSE = 20  # the most errors in a chain of causes that are looked at
_UNKNOWN = -1  # collectives: the script is in a block, or has left it by an exception


_LOST_GRADIENTS = (
    "gradients were zeroed, or set to None, inside of `for ... in step.batches():`. In this or "
    "another group that loop has several turns, and the gradients of all of them add up to the "
    "step's: call optimizer.zero_grad() above that loop, or below optimizer.step(), not inside of "
    "it"
)
_STEP_ABOVE_LOOP = (
    "step() was called before the first loop over session.steps(): this worker would train alone, "
    "as every other one does. elastic trains in `for step in session.steps(data, epochs=...):` "
    "with `with step:` around each step. The trainer of a framework, as of Lightning or "
    "transformers, has a loop of its own: write such a loop in its place, or leave out "
    "elastic.init() and start the script with --launch torchrun, which restarts all workers when "
    "one is lost. What each worker fits for itself, as a learning rate finder does, belongs above "
    "elastic.init(), or into session.warm_up(function), which undoes changes to tracked objects"
)
_STEP_IN_LOOP = (
    "step() was called inside of `for ... in step.batches():`. In this or another group that loop "
    "has several turns, and only the last one averages the gradients of all: call it below that "
    "loop"
)


class JobStopping(SystemExit):
    """Raised at a step boundary to leave the job. It unwinds the script."""


@dataclass(frozen=True, kw_only=True)
class ScriptCall:
    """A function that every worker calls at the same place of the script."""

    what: str
    where: str
    function: Callable[[], Any]
    state: Callable[[], str] = str
    """The digest of what must be equal on all members there, for `membership.meet`."""


_COMPARISON = ScriptCall(
    what="compares its parameters with the others'", where="", function=lambda: None
)


@dataclass(slots=True)
class Outcome:
    """How this member came to its state in the present group."""

    source: str = ""
    """"initial" or the checkpoint's name, if no member held the state."""
    bytes_received: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _FlatState:
    """A state that was received or restored. If it is of a later loop than the script, it is
    postponed until the script has come there."""

    skeleton: Any
    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    noise: Noise | None = None
    """What the default generators become; None: they stay as they are."""


class Training:
    """A worker's training: the driver of its Participation, which Session and Step call."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.state = JobState()
        self.clock = StepsClock()
        self.place = self.clock.place
        self.models: list[DistributedModel] = []
        self.scaled: list[ScaledOptimizer] = []
        self.optimizers = Optimizers(self.state)
        self.outcome = Outcome()
        self._membership = control.membership
        self.part = Participation(
            control.membership.machine,
            save_every=control.checkpoints.every,
            receives_in_place=control.backend.queues,
        )
        self.state.values.await_state = lambda: self.part.holds_back
        self._reads = StateDigests()
        self._undo = Undo(
            self.state,
            device=control.backend.device,
            wait_for_device=control.backend.wait_for_device,
            on_costly=self._tell_cost,
            on_slow=self._tell_slow_copies,
            before_write=self._reads.wait,
        )
        self._untracked: Untracked | None = Untracked(self.state, self._tell_untracked)
        """None after its last look."""
        self._data: DataLoader | None = None
        self._loaders: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
        self._loaders_seen = 0
        self._epochs: int | None = None
        self._max_steps: int | None = None
        self._planner: BatchPlanner | None = None
        self._postponed: _FlatState | None = None
        self._seed: int | None = None
        """The one that the script gave torch above its first loop."""
        self._read: Mapping[str, torch.Tensor] = {}
        """What this member has read of the checkpoint that rank 0 restores."""
        self._restored_noise: list[Json] | None = None
        """The generators of each rank, if this member has restored a checkpoint for the group that
        forms; empty if they are those of a group of another size."""
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
        self._called: ScriptCall | None = None
        """The call of `session.run` that the script is inside of, if its changes can be undone."""
        self._hurried_at: float | None = None
        """When the script was first found to be too late for the job's end."""
        self._handed_over: list[Passes] | None = None
        self._reductions = Reductions(self.models, self.part)
        self.loss_in_block: Exception | None = None
        """The error in this block that showed that the group is lost."""
        self._reduce_means: Callable[[], bool] = lambda: False
        self._watched: Group | None = None
        """The group whose collectives the script must not call outside of blocks."""
        self._collectives_left = _UNKNOWN
        """How many collectives that group had begun when elastic returned to the script."""
        self._performed: ScriptCall | None = None  # since the last commit
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
        self._require_trained_together()
        self.require_left_well()
        known = self._loaders.get(data)
        if known is None:  # numbered in order of use, even if each epoch has a new loader
            known = self._loaders[data] = self._loaders_seen
            self._loaders_seen += 1
        if self._seed is None:
            self._seed = torch.initial_seed()
            self.state.follow_rebuilt()
        self._data, self._epochs, self._max_steps = data, epochs, max_steps
        if max_steps is not None and self.part.took_part and not self.part.holds_back:
            self.state.results[_begin_of(self.part.loop + 1)] = self.part.progress.committed
        self.state.loader = known
        self.state.loop_begins()
        self._drive(self.part.begin_loop(known, data))

    def next_plan(self) -> tuple[BatchPlanner, BatchPlan] | None:
        """Come to the next step, and return its planner and plan. None after the last one."""
        if not self.part.passes_boundary():
            self._drive(self.part.boundary())
            if self.part.skips:
                return None
        self.state.progress = self.part.here
        planner = self._planner
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

    def current_plan(self, planner: BatchPlanner) -> tuple[BatchPlanner, BatchPlan] | None:
        """The step's new plan if the group has changed since it was handed out, else None. The
        group can change when the script calls `session.run` before the block."""
        if self._planner is planner or self._planner is None:
            return None
        plan = self._planner.next_plan()
        assert plan is not None, "no step was committed since"
        return self._planner, plan

    def end_loop(self) -> None:
        meet = ScriptCall(
            what="ends its loop over session.steps",
            where="",
            function=lambda: None,
            state=self._state_to_keep,
        )
        self._drive(self.part.end_loop(meet))
        self._close_planner()

    # ---- a step's block

    def begin_block(self, reduce_means: Callable[[], bool]) -> None:
        """The script enters `with step:`.

        reduce_means: sums values given to `step.mean`, and returns whether there were any. It is
        called before an optimizer steps: if a collective came later, each step would have to copy
        what the optimizer has changed, for the undo.
        """
        newest = self._require_no_collectives()
        if not self.control.lease.holds():
            self._await_lease()
        self._collectives_left = _UNKNOWN
        self.in_block = True
        self._reduce_means = reduce_means
        self.part.begin_block()
        self._reductions.begin_block(newest)
        for model in self.models:
            model.begin_block()
        self._call_together(True)
        self.place.now = Place.FORWARD, time.monotonic()
        self.clock.begin()
        self._undoable = True

    def _await_lease(self) -> None:
        """Wait while the node's lease to train is not valid: the others may form a group without
        this node. The worker stays as it is and gives signs of life. Raises Stranded if the lease
        is over for good."""
        lease = self.control.lease
        while not lease.holds():
            if lease.is_over():
                raise Stranded(
                    "the node of this worker was out of contact for longer than "
                    "--isolation-timeout-s, so the job may have gone on without it"
                )
            time.sleep(_LEASE_LOOK_S)

    def leave_block(self) -> None:
        self.in_block = self.in_batches = self._undoable = False
        for model in self.models:
            model.passes.accumulated.clear()
        self.place.now = Place.BETWEEN, time.monotonic()
        self.optimizers.block_ended()
        self.loss_in_block = None
        self._call_together(False)

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
            self._reductions.begin_pass()
        return self._reductions

    def reduce_gradients(self, reduce: bool) -> None:
        for model in self.models:
            model.reduce_gradients(reduce)

    def broadcast_first(self) -> None:
        """Do at once what DDP does in the first forward passes of a step by collectives, so that
        those of the micro-batches need none, other than the last one's."""
        try:
            for model in self.models:
                model.broadcast_first()
        except Exception as error:
            self.note_failure(error)
            raise

    def collectives(self) -> int | None:
        """How many collectives the group has begun. None if torch does not count them."""
        group = self._joining()
        count = group.collectives()
        return count if group.counts_collectives else None

    def have_gradients(self) -> list[bool]:
        """Of each model, whether it has gradients other than zero."""
        return [model.has_gradients() for model in self.models]

    def multiply_gradients(self, factor: torch.Tensor, left_over: Sequence[bool]) -> None:
        """Multiply the gradients that the last pass has averaged. left_over: of each model, whether
        it had gradients before the pass. Raises StepMisused if one of these models had."""
        for number in self._reductions.models_of_last_pass():
            if left_over[number]:
                raise StepMisused(
                    "step.backward() was given a weight while gradients of an earlier step or pass "
                    "were left, whose scale is another; call optimizer.zero_grad() before it"
                )
            self.models[number].multiply_gradients(factor)

    def keep_accumulated(self, *, ends_only: bool = False) -> None:
        """Remember gradients that the next micro-batch must find: what a micro-batch other than the
        last one has added, or what was there before the first one."""
        for model in self.models:
            model.keep_accumulated(ends_only=ends_only)

    def require_accumulated(self) -> None:
        """Raise StepMisused if gradients of the micro-batches before are gone."""
        for model in self.models:
            if model.has_lost_accumulated():
                raise StepMisused(_LOST_GRADIENTS)

    @property
    def world_size(self) -> int:
        seat = self.part.seat
        return seat.generation.world_size if seat is not None else 1

    def at_epoch_end(self) -> bool:
        """Whether the last committed step was its epoch's last."""
        data = self._data
        return data is not None and data.ends_epoch(self.state.position, self.world_size)

    def wait_for_reduction(self, newest: int | None = None) -> None:
        """Return when the reductions begun so far are known to be complete. Raises GroupLost.

        newest: the number of collectives that the group itself has begun, if it is known already.

        With gloo the backward pass itself returns only then, and this costs nothing. With NCCL
        reductions are queued on the device: without this wait, one that was aborted would raise
        only after the optimizer has used its gradients.
        """
        group = self._joining()
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
        self._reductions.end_block()
        part = self.part
        if part.begun == part.reduced:
            self._reductions.refuse_commit()
        if part.made != part.rhythm.expected:
            self._compare_reductions()
        if part.unread:
            self._read_rest()
        lease = self.control.lease
        if not lease.holds():
            self._await_lease()
        recovers = self.control.recovers
        group = self._watched
        self._collectives_left = group.collectives() if group is not None else 0
        later = recovers and self._undo.collectives_since_reduction(self._collectives_left)
        if later:
            self._joining().settle()
        if self._performed is not None:
            self._performed = None
            self._undo.forget_call()
        if means or self.state.means:
            self.state.means.load_state_dict(means)
        self.part.commit(samples)
        self.state.progress = progress = self.part.progress
        lease.note_commit(progress.committed_in, progress.committed)
        if recovers:
            self._undo.end(collectives_since_reduction=later)
        if self.control.keeps_ledger:
            self.state.ledger.append(self._record(samples))
        self.clock.commit(len(samples), self.part.progress.committed)
        self.control.reports.committed()

    def give_up_block(self, error: Exception) -> bool:
        """The group was lost in the block: join the next one. Returns whether the step counts."""
        for scaled in self.scaled:
            scaled.restore()
        counts: bool = self._drive(self.part.give_up_block(_as_loss(error)))
        self.state.progress = self.part.here if not counts else self.part.progress
        if not counts:
            self.clock.given_up += 1
        self.control.reports.given_up(counts=counts)
        return counts

    def is_loss(self, error: BaseException) -> bool:
        """Whether the error shows that the group is lost, and another group can follow."""
        self._block_if_handed_over()
        return (
            isinstance(error, Exception)
            and self.control.recovers
            and is_group_loss(error, self._membership.group)
        )

    def loss_behind(self, error: BaseException, outside: BaseException | None) -> Exception | None:
        """The error that shows that the group is lost: `error`, which has left the script, or one
        in its chain of causes, as with `raise MetricError(...) from error`. None: there is none.

        outside: an exception that was already being handled when the script's block or function
        began. The chain is not searched beyond it.
        """
        behind: BaseException | None = error if isinstance(error, Exception) else None
        for _ in range(_DEEPEST_CAUSE):
            if behind is None or behind is outside:
                return None
            if isinstance(behind, Exception) and self.is_loss(behind):
                return behind
            behind = behind.__cause__ or behind.__context__
        return None

    def note_failure(self, error: Exception) -> None:
        """A forward or backward pass raised `error`. If it shows that the group is lost, remember
        it: the script may catch it to skip a batch, but the group stays lost."""
        if self.in_block and self.is_loss(error):
            self.loss_in_block = error

    # ---- reductions

    def apart(self, function: Callable[[], Any]) -> Any:
        return self._reductions.apart(function)

    def _compare_reductions(self) -> None:
        """The block has made other reductions than the steps before let expect: raise StepMisused
        if the other members have not made the same. If the group is lost meanwhile, the
        step counts with a doubt: all of this rank's reductions are complete, and the optimizer has
        used them."""
        group = self._joining()
        try:
            membership.compare_reductions(group, self._standing(), self.part.made)
        except Exception as error:
            if not self.is_loss(error):
                raise
            self.part.doubtful = True

    def _standing(self) -> membership.Standing:
        return membership.Standing(
            committed=self.part.progress.committed,
            in_block=self.in_block and not self._driving,
            reductions=self.part.begun + self._reductions.under_way(),
            collectives=self._reductions.collectives(),
        )

    # ---- calls outside of steps

    def call(self, call: ScriptCall) -> Any:
        return self._drive(self.part.run(call))

    def postponed_result(self, *keys: str) -> Any:
        """The result that a call of `session.run` between two loops returned to the others, under
        the first of `keys` that the postponed state has. Raises ConfigurationError if it has
        none."""
        postponed = self._postponed
        assert postponed is not None, "no state waits"
        results = unflatten(postponed.skeleton, postponed.tensors)["session.results"]
        key = next((k for k in keys if k in results), None)
        if key is None:
            raise ConfigurationError(
                f"the script calls session.run() between loop {self.part.loop + 1} and the next "
                "one, but the worker that sent or saved the state did not; use the script "
                "that saved the checkpoint, or another checkpoint directory"
            )
        return results[key]

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
        self.require_left_well()
        if self._data is None:
            raise ConfigurationError(
                "the script ended without training: it never iterated over session.steps(); "
                "write `for step in session.steps(data, epochs=...):`"
            )
        if self.part.holds_back:
            raise ConfigurationError(
                f"the job's state belongs to loop {self.part.progress.loop + 1} over "
                f"session.steps(), but the script has only {self.part.loop + 1}; use the script "
                "that saved the checkpoint, or another checkpoint directory"
            )
        self.call(self._end_of_script(where))
        self.clock.spent.settle(time.monotonic())
        self._close_planner()
        self.control.finish()

    def close(self) -> None:
        """Leave the group and all optimizers, for another session in this process."""
        for hook in self._hooks:
            hook.remove()
        for model in self.models:
            model.unwrap()
        self._close_planner()
        if self._membership.group is not None:
            self._membership.leave()

    def _end_of_script(self, where: str = "") -> ScriptCall:
        return ScriptCall(
            what="ends the script",
            where=where,
            function=self._save_and_wait,
            state=lambda: self._state_to_keep() if self._saves_here() else "",
        )

    # ---- driving the protocol

    def _carriers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            act.Join: self._join,
            act.Declare: self._declare,
            act.ExplainMismatch: self._explain_mismatch,
            act.DropState: lambda _: self._membership.drop_state(),
            act.Send: self._send,
            act.Receive: self._receive,
            act.Restore: self._restore,
            act.ReadCheckpoint: self._read_checkpoint,
            act.TakePostponed: self._take_postponed,
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
            act.KeepForRetry: self._keep_for_retry,
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
                    self._require_no_collectives()
                try:
                    resume, value = protocol.send, self._carry_out[type(action)](action)
                except Exception as error:  # noqa: BLE001 - the protocol decides what follows
                    resume = protocol.throw
                    value = _as_loss(error) if self.is_loss(error) else error
        finally:
            self._driving = False
            self.place.now = Place.BETWEEN, time.monotonic()
            if acted:
                self._watched = group = self._membership.group
                self._collectives_left = group.collectives() if group is not None else 0

    def _hand_over_state(self) -> None:
        """Give the state to the next group before the process ends: the script's thread does not
        return from a group that was aborted. Runs on a thread of its own."""
        if self.in_block and not self._driving and self._handed_over is None:
            self._handed_over = [model.leave_behind() for model in self.models]
            self._drive(self.part.hand_over_state())

    def _may_stop_script(self) -> bool:
        """Whether the script's thread may be stopped for good where it is, because the job stops
        and has no time left for it. That thread asks, or another one that looks at it.

        At once in a block that can be undone, since its group is gone. Past that the coordinator
        decides how long the others wait for it. Elsewhere the script gets `_ENDS_BY_ITSELF_S` to
        come to the boundary by itself.
        """
        if not self._membership.machine.is_out_of_time or self._handed_over is not None:
            return False
        now = time.monotonic()
        if self._hurried_at is None:
            self._hurried_at = now
        if (self.in_block and not self._undoable) or (self._driving and self._called is None):
            return False
        return self.in_block or now - self._hurried_at >= _ENDS_BY_ITSELF_S

    def _leave_early(self) -> bool:
        """Save the state from before what the script's thread does, which has stopped for good, and
        leave the job. Runs on a thread of its own. Returns False if that state cannot be saved."""
        self._handed_over = [model.leave_behind() for model in self.models]
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
        self.control.reports.notice(
            "left_early",
            {
                "step": str(self.part.progress.committed),
                "within": within,
                "place": _place_of_main_thread()[0],
                "lasts_s": f"{self.clock.in_step_s() or time.monotonic() - self.place.now[1]:.1f}",
                "undone": str(whole).lower(),
            },
        )

    def _block_if_handed_over(self) -> None:
        """Block the script's thread for ever if it returns after `_hand_over_state` has begun: the
        state is no longer its own."""
        if self._handed_over is not None and threading.current_thread() is threading.main_thread():
            threading.Event().wait()

    # ---- into a group

    def _join(self, join: act.Join) -> act.Seat:
        """Join a group. Meanwhile, read the state for its digests, which takes milliseconds."""
        if join.held and not self._reads.begun:  # an earlier attempt may have left them
            self._reads.begin(self.state, self._undo, at_begin=join.at_begin)
        self.place.now = Place.JOINING, time.monotonic()
        group = self.control.join()
        return act.Seat(generation=group.generation, rank=group.rank)

    def _declare(self, declare: act.Declare) -> tuple[Declaration, ...]:
        self.outcome, self._restored_noise, self._read = Outcome(), None, {}
        commit, begin, unread = self._reads.digests(whole=declare.whole)
        mine = replace(
            declare.mine,
            signature=self.state.signature(),
            commit_digest=commit,
            begin_digest=begin,
            unread=unread,
        )
        return membership.declare(self._joining(), mine)

    def _explain_mismatch(self, mismatch: act.ExplainMismatch) -> None:
        membership.explain_mismatch(
            self._joining(),
            mismatch.reference,
            mismatch.odd,
            (*self.state.structure(), *self.state.arrangement()),
        )

    def _tell_difference(self, difference: act.TellDifference) -> None:
        """Report the names of what differs, as an event of the member whose state is replaced."""
        group = self._joining()
        if group.rank == difference.right:
            for rank in difference.ranks:
                send_json(group, self.state.digests(), rank)
        elif group.rank in difference.ranks:
            names = membership.differences(
                self.state.digests(), receive_json(group, difference.right)
            )
            self.control.reports.notice(
                "state_differed",
                {
                    "step": str(self.part.progress.committed),
                    "names": ", ".join(names[:10]),
                    "differing": str(len(names)),
                },
            )

    def _send(self, send: act.Send) -> None:
        self._reads.wait()
        group = self._joining()
        with self._undo.as_of_commit() if send.mark is Mark.COMMIT else contextlib.nullcontext():
            if self._postponed is not None:
                skeleton, tensors = self._postponed.skeleton, self._postponed.tensors
                extra = dict(self._postponed.extra)
            else:
                flat = self.state.capture()
                skeleton, tensors = flat.skeleton, flat.tensors
                extra = self.state.extra(send.progress)
            specs = describe(tensors)
            learnt = self._undo.learnt()
            document = {
                "tensors": to_table(specs),
                "skeleton": skeleton,
                "extra": extra,
                "learnt": asdict(learnt) if learnt is not None else None,
                "restored": self._restored_noise is not None,
                "generators": self._restored_noise,
            }
            send_json(group, document, send.rank)
            send_tensors(group, {spec.name: tensors[spec.name] for spec in specs}, send.rank)

    def _receive(self, receive: act.Receive) -> Progress:
        self._reads.wait()
        group = self._joining()
        document = receive_json(group, receive.rank)
        if receive.then is not None:
            send_json(group, document, receive.then)
        if document["learnt"] is not None:
            self._undo.take_over(Learnt(**document["learnt"]))
        in_place = self.control.backend.queues  # a device has no room for a second state
        later = progress_of(document["extra"]).loop > receive.loop
        read, self._read = self._read, {}
        tensors, self.outcome.bytes_received = receive_tensors(
            group,
            from_table(document["tensors"]),
            receive.rank,
            into=self.state.receivable() if in_place and not later else {},
            known={} if later else read or self.state.comparable(),
            then=receive.then,
        )
        extra = document["extra"]
        # A survivor's generators go on, and those of a worker that begins the job are the script's.
        renews = document["restored"] or (
            not self.part.took_part and progress_of(extra).committed > 0
        )
        flat = _FlatState(
            skeleton=document["skeleton"],
            tensors=tensors,
            extra=extra,
            noise=self._noise(extra, document["generators"]) if renews else None,
        )
        return self._take_or_postpone(flat, receive.loop, at_commit=receive.mark is Mark.COMMIT)

    def _noise(self, extra: Mapping[str, Any], restored: Sequence[Json] | None) -> Noise:
        """Return this rank's generators. restored: those that a checkpoint has for the ranks of a
        group of this size."""
        assert self._seed is not None, "a state is received in a loop"
        rank = self._joining().rank
        seed = seed_at(self._seed, rank, progress_of(extra).committed)
        return Noise(seed=seed, saved=restored[rank] if restored else None)

    def _restore(self, restore: act.Restore) -> Progress | None:
        self._reads.wait()
        group = self._joining()
        loaded, self.outcome.source = self.control.checkpoints.load(
            lambda s: {} if _is_later(s, restore.loop) else self.state.comparable()
        )
        if loaded is None:
            return None
        extra = loaded.structure.extra
        states = unflatten(loaded.structure.skeleton, loaded.tensors)
        require_same_kind(self.state.tracked, states)
        fits = len(loaded.generators) == group.world_size
        self._restored_noise = list(loaded.generators) if fits else []
        flat = _FlatState(
            skeleton=loaded.structure.skeleton,
            tensors=loaded.tensors,
            extra=extra,
            noise=self._noise(extra, self._restored_noise),
        )
        return self._take_or_postpone(flat, restore.loop, at_commit=False)

    def _read_checkpoint(self, read: act.ReadCheckpoint) -> bool:
        if self.control.backend.queues:  # rank 0 sends to devices from its device
            return False
        self._reads.wait()
        group = self._joining()
        rooms: list[Mapping[str, torch.Tensor]] = []

        def room(structure: Structure) -> Mapping[str, torch.Tensor]:
            if _is_later(structure, read.loop):
                raise NotNeeded("the script has not come to the checkpoint's loop")
            rooms.append(self.state.comparable())
            return rooms[-1]

        self._read = self.control.checkpoints.read(room, lambda: not group.lost)
        return any(rooms)

    def _take_or_postpone(self, flat: _FlatState, loop: int, *, at_commit: bool) -> Progress:
        progress = progress_of(flat.extra)
        self.control.checkpoints.went_on_from(progress.committed)
        self._postponed = flat if progress.loop > loop else None
        if self._postponed is None:
            self._put_in_place(flat, progress, at_commit=at_commit)
        else:
            self.state.progress = progress
        return progress

    def _put_in_place(self, flat: _FlatState, progress: Progress, *, at_commit: bool) -> None:
        self._reads.forget()
        if flat.noise is not None:  # first: a tracked object may put generators back itself
            flat.noise.put_in_place(self.control.backend.device)
        self.state.restore(flat.skeleton, flat.tensors, flat.extra)
        self.state.progress = progress
        self._undo.received(at_commit=at_commit)

    def _take_postponed(self, _: act.TakePostponed) -> None:
        flat, self._postponed = self._postponed, None
        assert flat is not None, "no state waits"
        self._put_in_place(flat, progress_of(flat.extra), at_commit=False)

    def _set_up(self, _: act.SetUp) -> None:
        if self._handed_over is not None:
            return  # this process will not train any more
        self.clock.setup_began()
        self._close_planner()
        self._reductions.follow(self._joining())
        caches = self.state.buffers.caches_of_group()
        for model in self.models:
            model.wrap(self.control.backend, caches)
        if self.control.recovers and not self.control.backend.queues:
            # On a device, gradients are only queued when the hook is called.
            parameters = [p for model in self.models for p in model.passes.parameters]
            self.clock.pace.arrival.watch(parameters)
        group, data = self._joining(), self._data
        if data is not None:
            self._planner = BatchPlanner(
                data,
                self.part.progress.position(self.part.loader),
                rank=group.rank,
                world_size=group.world_size,
                epochs=self._epochs,
                steps=self._steps_left(),
                equal=data.equal_passes
                or len(self.models) > 1  # their collectives would come in different orders
                or any(m.communicates_in_passes() for m in self.models),
                equal_at_first=any(model.passes.learns_graph for model in self.models),
            )
        self.clock.setup_ended()

    def _steps_left(self) -> int | None:
        """The steps up to `max_steps` of the present loop, counted from where the job began it: a
        worker that joins gets that place with the results of calls between loops."""
        part = self.part
        if self._max_steps is None or part.holds_back:
            return None
        began = self.state.results.get(_begin_of(part.loop)) if part.loop else 0
        if began is None:
            raise ConfigurationError(
                f"session.steps(max_steps={self._max_steps}): the job is in loop {part.loop + 1} "
                "over session.steps(), which it began without max_steps, so it is not known with "
                "which step; use the script that saved the checkpoint, or another checkpoint "
                "directory"
            )
        return max(0, began + self._max_steps - part.progress.committed)

    def _tear_down(self, _: act.TearDown) -> None:
        self.clock.interrupt()
        self._reductions.leave()
        for model in self.models:
            model.unwrap()
        self._close_planner()

    def _entered(self, _: act.Entered) -> None:
        if self.part.unread:
            self._reads.script_goes_on()
        else:
            self._reads.forget()
        self.place.now = Place.BOUNDARY, time.monotonic()
        self.state.progress = self.part.progress
        group, took = self._joining(), self._membership.durations
        self.clock.entered(
            group.generation.number,
            join_s=took.join_s,
            sync_s=took.sync_s,
            world_size=group.world_size,
        )
        self.control.reports.entered(group, self.outcome)

    def _joining(self) -> Group:
        group = self._membership.group
        if group is None:
            raise GroupLost("there is no group")
        return group

    def _close_planner(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    # ---- state

    def _put_back(self, _: act.PutBack) -> bool:
        for model in self.models:
            model.unwrap()
        self._reads.forget()  # the block may have changed what was not to change
        return self._undo.put_back()

    def _keep_for_retry(self, _: act.KeepForRetry) -> None:
        self._undo.keep_for_retry()

    def _compare_replicas(self, _: act.CompareReplicas) -> None:
        group = self._joining()
        if group.world_size == 1:
            return
        committed, every = self.part.progress.committed, self.control.checkpoints.every
        order = self._data.order if self._data is not None else ""
        self.clock.wait_began()  # the coordinator looks for a cut link only where members wait
        try:
            orders = membership.meet(group, self._standing(), "replicas", _COMPARISON, order)
            if orders:
                self._refuse_orders(orders)
            self._require_equal(group, saves=every > 0 and committed % every == 0)
        finally:
            self.clock.wait_ended()

    def _compare_unread(self, _: act.CompareUnread) -> bool:
        group, here = self._joining(), self._standing()
        self.clock.wait_began()
        try:
            if membership.have_equal(group, here, self._reads.rest()):
                return True
            # The block may have written to something for the first time while that was read.
            return membership.have_equal(group, here, self._reads.rest_now(self.state), again=True)
        finally:
            self.clock.wait_ended()
            self._reads.forget()

    def _read_rest(self) -> None:
        """Before the block changes what the group has not compared: do so. Raises GroupLost if
        members differ."""
        try:
            self.part.read(same=self._compare_unread(act.CompareUnread()))
        except Exception as error:
            self.note_failure(error)
            raise

    def _refuse_orders(self, orders: Mapping[int, str]) -> NoReturn:
        odd = next(rank for rank in orders if orders[rank] != orders[0])
        raise StepMisused(
            f"rank {odd} divides other samples than rank 0, so some would count twice and others "
            f"never: its elastic.DataLoader has {orders[odd]}, and rank 0's has {orders[0]}. Every "
            "worker, also one that joins later, must create it with the same arguments, the seed "
            "too, and for as many samples: make sure that all list the same files"
        )

    def _saves_here(self) -> bool:
        """Whether the state as it is now would be saved by `_save_and_wait`."""
        step = self.part.progress.committed
        group, began_at = self._joining(), self.part.agreed_at
        checkpoints = self.control.checkpoints
        return not checkpoints.is_committed(step) and checkpoints.saves(
            step, group, began_at=began_at
        )

    def _state_to_keep(self) -> str:
        """A digest of what members must have in common before the last save, which may be of a step
        after which replicas were not compared."""
        group = self._joining()
        if group.world_size == 1 or group.generation.purpose is not Purpose.TRAIN:
            return ""  # members of a group that leaves have compared all when it formed
        shapes = _shapes_digest(self.state) if self.control.checkpoints.has_directory else 0
        return f"{self.state.compared_digest():x}/{shapes:x}"

    def _require_equal(self, group: Group, *, saves: bool) -> None:
        """Compare the parameters and values of all members, and what they would save. Raises
        StepMisused with the ranks and names that differ."""
        committed = self.part.progress.committed
        odd = membership.differing_parameters(
            group, self.state.compared_digest(), self.state.compared_digests
        )
        if not odd and saves:
            self._require_shares_that_fit(group)
        if odd:
            raise StepMisused(
                f"the parameters or values of {_shown(odd, group)} differ from those of rank 0 "
                f"after step {committed}, although nothing was lost. Either they were changed "
                "without averaging: call the model that session.distribute() returned, make every "
                "trained nn.Parameter one of such a model, whose forward() uses it, change "
                "parameters in the same way on every rank, put only values into session.state that "
                "are the same everywhere, such as those of step.mean(), and seed what is random; "
                "session.track_local() is for what differs. Or a worker that joined lacks an "
                "object that the step uses: pass schedulers, averages and the like to "
                "session.track()"
            )

    def _require_shares_that_fit(self, group: Group) -> None:
        """Raise StepMisused if members would save different tensors in the save that follows. Each
        saves a part, and a checkpoint of parts that do not fit could not be read."""
        odd = membership.differing_parameters(
            group, _shapes_digest(self.state), self.state.saved_shapes
        )
        if odd:
            raise StepMisused(
                f"{_shown(odd, group)} would save other tensors than rank 0 after step "
                f"{self.part.progress.committed}, but a checkpoint has a part from each. Tracked "
                "objects must have the same tensors on every rank, session.state too: decide what "
                "to keep there by values that are the same everywhere, such as those of "
                "step.mean(), and pass what differs between ranks to session.track_local()"
            )

    def _save(self, save: act.Save) -> None:
        self.place.now = Place.SAVING, time.monotonic()
        self.state.progress = save.progress
        began = time.monotonic()
        self.control.checkpoints.save(self.state, self._joining(), began_at=self.part.agreed_at)
        self.clock.saved(began)
        self.place.now = Place.BOUNDARY, time.monotonic()

    def _save_and_wait(self, *, insists: bool = False) -> None:
        self.place.now = Place.SAVING, time.monotonic()
        self.state.progress = self.part.here
        began = time.monotonic()
        try:
            self.control.checkpoints.save_and_wait(
                self.state,
                self._joining(),
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
        self.clock.wait_began()
        self.place.now = Place.MEETING, time.monotonic()
        try:
            group = self._joining()
            call: ScriptCall = meeting.call
            repeats = meeting.number < self.part.runs_done  # and the script has gone on since
            state = "" if repeats else call.state()
            if membership.meet(group, self._standing(), str(meeting.number), call, state):
                self._require_equal(group, saves=self.control.checkpoints.has_directory)
        finally:
            self.clock.wait_ended()

    def _perform_call(self, perform: act.Perform) -> Any:
        """Make the call. It may change tracked objects for a while, as an evaluation with averaged
        weights does. If the group is lost meanwhile, such changes are undone; StateTorn if they
        cannot be."""
        self._reads.forget()  # the call may change what is being read
        call: ScriptCall = perform.call
        if not call.where or not self.control.recovers or self._handed_over is not None:
            return self._call_function(call)
        if self._performed is call:
            with self._undo.as_of_call():
                return self._call_function(call)
        self._undo.begin_call(call.where)
        self._called = call
        try:
            with self._undo.watch_call(call.where):
                result = self._call_function(call)
        except Exception as error:
            if self.is_loss(error) and not self._undo.put_back_call():
                raise StateTorn(
                    f"the group was lost in session.run at {call.where}, which had changed the "
                    "state in a way that cannot be undone"
                ) from error
            raise
        finally:
            self._called = None
        self._undo.end_call(call.where)
        self._performed = call
        return result

    def _call_function(self, call: ScriptCall) -> Any:
        self._call_together(True)
        began = time.monotonic()
        self.place.now = Place.RUN, time.monotonic()
        outside = sys.exc_info()[1]
        try:
            result = call.function()
        except Exception as error:
            loss = self.loss_behind(error, outside)
            if loss is None or loss is error:
                raise
            raise GroupLost(str(loss)) from error
        finally:
            self._call_together(False)
            self.clock.called(began)
        self._joining().settle()
        return result

    def _call_together(self, together: bool) -> None:
        self.clock.in_call = together
        for model in self.models:
            model.passes.together = together

    def _answer_calls(self) -> None:
        """On the reporting thread: tell members that wait for this one where it is, if it will not
        come to them."""
        group = self._membership.group
        if group is None or not self.in_block or self.clock.in_step_s() < _ELSEWHERE_S:
            return
        where, waits = _place_of_main_thread()
        doing = f"inside the block of step {self.part.progress.committed} at {where}"
        membership.answer(group, self._standing(), doing, waits=waits)

    # ---- what the script does wrong

    def _require_trained_together(self) -> None:
        covered = {id(p) for module in self.state.modules().values() for p in module.parameters()}
        if not self.models:
            raise ConfigurationError(
                "no model was given to session.distribute(), so every worker would train its "
                "own; write `model = session.distribute(Net())`"
            )
        for model in self.models:
            if any(id(p) not in covered for p in model.parameters()):
                raise ConfigurationError(
                    f"a model given to session.distribute() ({type(model.module).__name__}) is not "
                    "tracked, so a joining worker would begin with other weights; call "
                    "session.track(model=model, optimizer=optimizer)"
                )

    def require_left_well(self) -> None:
        """Raise StepMisused if the script left its loop with a step that does not count."""
        if self.part.owes_step:
            raise StepMisused(
                f"the loop over session.steps() was left after a block of step "
                f"{self.part.progress.committed} that does not count: the group was lost in it, or "
                "an exception has left it, so the step would be missing; leave the loop only after "
                "steps that count, as in `if session.committed >= 1000: break` or "
                "`if step.committed and ...: break`"
            )

    def _require_no_collectives(self) -> int | None:
        """Raise StepMisused if the script called collectives outside of a block. They work until
        the group changes, but then they meet other collectives of members that join. Returns how
        many the group has begun, or None if that is not known for this group alone."""
        group = self._watched
        if group is None:
            return None
        count = group.collectives()
        if group.lost or not group.counts_collectives:
            return None
        if self._collectives_left in (_UNKNOWN, count):
            return count if len(GROUPS) < 2 else None
        raise StepMisused(
            "a collective of torch.distributed was called outside of `with step:` (steps committed "
            f"so far: {self.part.progress.committed}); when a worker is lost or joins, it would "
            "fail, or match another collective of that worker. Call it inside of the block, or "
            "pass the function that calls it to session.run(); step.mean() returns means over all "
            "workers without a further collective"
        )

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.in_backward:
            raise StepMisused(
                f"{type(optimizer).__name__}.step() was called during step.backward(), "
                "as by register_post_accumulate_grad_hook(): its gradients are not averaged yet; "
                "call it below step.backward()"
            )
        self._undoable = False
        if not self.in_block:
            if self.part.loop < 0 and not self._warming_up:
                raise StepMisused(f"{type(optimizer).__name__}.{_STEP_ABOVE_LOOP}")
            self.optimizers.steps_below(optimizer)
        elif self.loss_in_block is not None:
            raise self.loss_in_block  # which the script has caught, as to skip a bad batch
        elif self.in_batches:
            raise StepMisused(f"{type(optimizer).__name__}.{_STEP_IN_LOOP}")
        else:
            part = self.part
            if part.made and part.begun == part.reduced:
                self._reductions.refuse_step_of(optimizer)
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

    def _tell_cost(self, names: list[str], size_bytes: int, copy_s: float) -> None:
        """Report what each step copies, once a job: only rank 0, the oldest member, does so."""
        if self._joining().rank != 0:
            return
        self.control.reports.notice(
            "step_copies_state",
            {
                "names": ", ".join(names),
                "bytes": str(size_bytes),
                "copy_ms": f"{copy_s * 1000:.3g}",
                "advice": "these change before the step's last collective, so every step copies "
                "them; make all collectives, step.mean() included, before the first "
                "optimizer.step() to avoid that",
            },
        )

    def _tell_slow_copies(self, names: list[str], copy_s: float) -> None:
        """Report state that takes long to copy although its tensors are small."""
        if self._joining().rank != 0:
            return
        self.control.reports.notice(
            "step_copies_state",
            {
                "names": ", ".join(names),
                "bytes": "0",
                "copy_ms": f"{copy_s * 1000:.3g}",
                "advice": "every step copies these twice, because they are many objects or NumPy's "
                "arrays, whose changes cannot be seen; keep them in a few tensors, or outside of "
                "what is tracked",
            },
        )

    def _look_for_untracked(self, untracked: Untracked) -> None:
        if untracked.step_begins() and self._joining().rank == 0:
            with contextlib.suppress(Exception):  # odd objects must not end the training
                untracked.look()
        if untracked.is_over:
            self._untracked = None

    def _tell_untracked(self, names: str, advice: str) -> None:
        self.control.reports.notice("untracked_state", {"names": names, "advice": advice})

    def _record(self, samples: SampleRange) -> LedgerRecord:
        group = self._joining()
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


def _begin_of(loop: int) -> str:
    """The name, among the results of calls between loops, of the step with which a loop began."""
    return f"{loop}/began"


def _shapes_digest(state: JobState) -> int:
    """A digest of the tensors that this member would save."""
    return digest_of([], documents.encode({"shapes": state.saved_shapes()}))


def _is_later(structure: Structure, loop: int) -> bool:
    """Whether a checkpoint was saved in a later loop, to which the script has not come yet."""
    return progress_of(structure.extra).loop > loop


def _as_loss(error: Exception) -> GroupLost:
    if isinstance(error, GroupLost):
        return error
    lost = GroupLost(str(error))
    lost.__cause__ = error
    return lost


def _shown(odd: Mapping[int, list[str]], group: Group) -> str:
    """The ranks that differ, in words. On one of these ranks, also the names of what differs."""
    names = odd.get(group.rank) or []
    which = f" ({', '.join(names[:3])})" if names else ""
    return f"rank {', '.join(map(str, odd))}{which}"


def _place_of_main_thread() -> tuple[str, bool]:
    """The file name and line of the script's innermost frame, and whether the thread is inside of
    torch's code for collectives or for backward passes."""
    frames = stacks_of_threads().get(threading.main_thread().ident or 0, ())
    inside = bool(frames) and any(p in frames[0].file for p in _WAITS)
    return _place((frame.file, frame.line) for frame in frames), inside


def place_of_script(frame: FrameType | None) -> str:
    """The file name and line of the innermost frame of the script, from `frame` on outwards.
    frame: one of the calling thread."""
    return _place((f.f_code.co_filename, f.f_lineno) for f in _outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(calls: Iterable[tuple[str, int]]) -> str:
    packages = ("/elastic/worker/", "/elastic/runtime/", "/site-packages/", "/lib/python3")
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    for file, line in calls:
        if file == script or not any(p in file for p in packages):
            return f"{file.rpartition('/')[2]}:{line}"
    return "an unknown place"
