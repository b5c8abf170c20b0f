"""The user's API: one session per worker, from elastic.init() to the end of the script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from elastic.core.data_order import advance
from elastic.core.learning_rate import ScalingRule
from elastic.errors import ConfigurationError, GroupLost, NotInGroup, StepMisused, StepOverdue
from elastic.worker.control import AgentControl, Control, LocalControl
from elastic.worker.data_loader import DataLoader, Dealer
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group
from elastic.worker.learning_rate import ScaledOptimizer, retarget
from elastic.worker.link import Link
from elastic.worker.participation import Participation
from elastic.worker.state.job_state import JobState, Stateful
from elastic.worker.state.ledger import LedgerRecord
from elastic.worker.step import Step
from elastic.worker.steps_clock import StepsClock

T = TypeVar("T")

_BROKEN_OFF_WAIT_S = 10.0  # for the other members' shares, where a script left its loop early


class Session:
    """A worker's part in the job. Made by `elastic.init()`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._state = JobState()
        self._clock = StepsClock()
        self._part = Participation(control, self._state, self._clock)
        self._part.equip(self)
        self._models: list[DistributedModel] = []
        self._scaled: list[tuple[ScaledOptimizer, ScalingRule]] = []
        self._data: DataLoader | None = None
        self._dealer: Dealer | None = None
        self._epochs = 0
        self._optimizer_steps = 0
        self._counted: set[int] = set()
        control.publish(self._state, self._clock)

    # ---- who and where

    @property
    def rank(self) -> int:
        """This worker's rank in the present group."""
        return self._group("rank").rank

    @property
    def world_size(self) -> int:
        """Number of workers in the present group."""
        return self._group("world_size").world_size

    @property
    def generation(self) -> int:
        """Number of the present group."""
        return self._group("generation").generation.number

    @property
    def local_rank(self) -> int:
        """This worker's slot on its node."""
        return self._control.slot

    @property
    def device(self) -> torch.device:
        """Where this worker's model and batches belong."""
        return self._control.backend.device

    @property
    def committed(self) -> int:
        """Steps committed by the job so far."""
        return self._state.committed

    # ---- setting up

    def distribute(self, module: nn.Module, **options: Any) -> DistributedModel:
        """Put the module on the session's device and train it data-parallel.

        options: DistributedDataParallel's (bucket_cap_mb, find_unused_parameters, static_graph,
        gradient_as_bucket_view, broadcast_buffers...).
        """
        model = DistributedModel(module.to(self.device), options)
        self._models.append(model)
        if self._part.group is not None:
            model.wrap(self._control.backend)
        return model

    def track(self, **objects: Stateful) -> None:
        """Replicate these objects to joining workers, save and restore them with checkpoints.

        Anything with state_dict() and load_state_dict(). Raises ConfigurationError.
        """
        self._state.track(objects)
        for optimizer in self._state.optimizers():
            if id(optimizer) not in self._counted:
                self._counted.add(id(optimizer))
                optimizer.register_step_post_hook(self._count_optimizer_step)

    def scale_lr(self, optimizer: torch.optim.Optimizer, rule: ScalingRule) -> None:
        """Scale the optimizer's learning rates with the global batch, by `rule`."""
        number = len(self._scaled)
        scaled = ScaledOptimizer(optimizer, lambda: self.lr_factor(number))
        self._scaled.append((scaled, rule))

    def lr_factor(self, number: int = 0) -> float:
        """The factor in force on the learning rates of the scaled optimizer `number`."""
        ramp = self._state.ramps.get(str(number))
        return ramp.factor(self._state.committed) if ramp is not None else 1.0

    # ---- training

    def steps(self, data: DataLoader, *, epochs: int) -> Iterator[Step]:
        """The steps that are left of `epochs` epochs, whatever happens to the group meanwhile."""
        if epochs < 0:
            raise ConfigurationError(f"session.steps: epochs={epochs} is negative")
        self._require_tracked()
        self._data, self._epochs = data, epochs
        if self._dealer is not None:  # the script left an earlier loop
            self._deal(self._group("steps"))
        while True:
            self._part.at_boundary()
            dealer = self._dealer
            step = self._next_step()
            if step is None:
                break
            self._control.checkpoints.save_if_due(self._state, self._group("steps"))
            yield step
            if not step.was_entered:
                raise StepMisused(
                    "a step was not used: write `for step in session.steps(...):` and directly "
                    "below it `with step:`"
                )
            if not step.committed and self._dealer is dealer:
                raise StepMisused(
                    f"step {step.index} was left by an exception that the script then caught: its "
                    "samples would be lost; catch it inside of `with step:`, or not at all"
                )
        self._end_steps()

    def run(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        """`function(*args, **named)`, for collectives outside of a step, as in an evaluation.

        Runs it again in the new group if it lost the old one. Every worker must call it, at the
        same place of the script, in or after the loop over `session.steps`.
        """
        if self._data is None:
            raise ConfigurationError(
                "session.run() was called before session.steps(): a worker that joins later could "
                "not catch up with it; call it in the loop or after it"
            )
        return self._part.run(lambda: function(*args, **named))

    # ---- for Step

    def begin_step(self, step: Step) -> None:
        """The script enters the commit scope.

        If it has called `run` since the step was handed out, the group may have changed meanwhile,
        and what was dealt for the old one is of no use.
        """
        dealer = self._dealer
        if dealer is not None and step.dealer is not dealer and (deal := dealer.deal()) is not None:
            step.take(dealer, deal)
        for model in self._models:
            model.save_buffers()
        self._optimizer_steps = 0
        self._clock.begin()

    def require_dealt(self, step: Step) -> None:
        """Raise StepOverdue if no step is left: the others had come to the end."""
        if step.dealer is not self._dealer:
            raise StepOverdue(f"step {step.index} was committed without this worker")

    def reduce_gradients(self, reduce: bool) -> None:
        """Whether the next backward all-reduces."""
        for model in self._models:
            model.reduce_gradients(reduce)

    def wait_for_reduction(self) -> None:
        """Return when the all-reduce is known to be complete; raises GroupLost if it is not.

        gloo's backward returns only then. NCCL's is queued: an aborted one would not raise before
        the optimizer has used its gradients.
        """
        if self.device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()
        self._part.require_current()

    def is_group_loss(self, error: Exception) -> bool:
        """Does the error say that the group is lost?"""
        return self._part.is_loss(error)

    def report(self, values: dict[str, Any]) -> None:
        """Figures for whoever watches."""
        self._control.report(values)

    def commit(self, step: Step) -> None:
        """The step's block has ended well."""
        if self._control.keeps_ledger:
            self._state.ledger.append(self._record(step))
        self._state.position = advance(self._state.position, step.samples)
        self._state.committed += 1
        self._state.committed_in = self.generation
        self._clock.commit(len(step.samples))
        self._part.committed()

    def recover(self, step: Step, error: Exception, *, reduced: bool) -> bool:
        """The group was lost inside the step's block: join the next one.

        Returns whether the step counts: because it was complete here, or on a member whose state
        this worker has received.
        """
        optimizers, stepped = len(self._state.optimizers()), self._optimizer_steps
        complete = reduced and 0 < optimizers <= stepped
        # Between two optimizers' steps the state is of use to nobody; before the first it is whole.
        torn = not complete and (stepped > 0 or (reduced and optimizers == 0))
        if complete:
            self.commit(step)
        else:
            for model in self._models:
                model.restore_buffers()
        for scaled, _ in self._scaled:
            scaled.restore()
        self._part.lose(error, torn=torn)
        self._part.enter()
        return self._state.committed > step.index

    # ---- for Participation

    def set_up(self, group: Group) -> None:
        """Wrap the models, aim the learning rates, deal the data."""
        for model in self._models:
            model.wrap(group.backend)
        data = self._data
        if data is None:
            return
        for number, (_, rule) in enumerate(self._scaled):
            ratio = data.batch_ratio(group.world_size, rule.reference_world)
            ramp = self._state.ramps.get(str(number))
            self._state.ramps[str(number)] = retarget(ramp, rule, ratio, self._state.committed)
        self._deal(group)

    def tear_down(self) -> None:
        """Unwrap the models, drop what was loaded for this group."""
        for model in self._models:
            model.unwrap()
        self._close_dealer()

    # ---- for the bootstrap

    def finish(self) -> None:
        """The script has ended: wait until every member's has."""
        if self._data is None:
            raise ConfigurationError(
                "the script ended without training: it never iterated over session.steps(); "
                "write `for step in session.steps(data, epochs=...):`"
            )
        if self._dealer is not None:
            self._save_broken_off()
        self._control.finish()

    def abandon(self) -> None:
        """The script has failed: free the others."""
        self._control.membership.abandon()

    # ---- inside

    def _group(self, what: str) -> Group:
        if self._part.group is None:
            raise NotInGroup(
                f"session.{what} is not known yet: the group forms when session.steps() begins, "
                "so that a joining worker can build its model before the others wait for it; use "
                f"{what} inside the loop, or session.local_rank outside"
            )
        return self._part.group

    def _require_tracked(self) -> None:
        tracked = list(self._state.tracked.values())
        if any(model not in tracked for model in self._models):
            raise ConfigurationError(
                "a model given to session.distribute() is not tracked, so a joining worker would "
                "begin with other weights; call session.track(model=model, optimizer=optimizer)"
            )

    def _deal(self, group: Group) -> None:
        self._close_dealer()
        if self._data is not None:
            self._dealer = Dealer(
                self._data,
                self._state.position,
                rank=group.rank,
                world_size=group.world_size,
                epochs=self._epochs,
            )

    def _next_step(self) -> Step | None:
        dealer = self._dealer
        if dealer is None or (deal := dealer.deal()) is None:
            return None
        return Step(self, dealer, deal)

    def _end_steps(self) -> None:
        """Meet at the end, since a member that is a step behind still needs another's state; and
        keep the result, whatever the interval between checkpoints."""
        self._part.run(self._meet)
        self._part.run(self._save_last)
        self._close_dealer()

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def _meet(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))
        self._part.require_current()

    def _save_last(self) -> None:
        group = self._group("steps")
        superseded = self._control.membership.must_leave
        self._control.checkpoints.save_and_wait(self._state, group, superseded)

    def _save_broken_off(self) -> None:
        """The script left the loop before its end: keep the result, if every member left it at
        this step. No collective here, which a member that still trains would take for its own."""
        deadline = time.monotonic() + _BROKEN_OFF_WAIT_S
        must_leave = self._control.membership.must_leave
        with contextlib.suppress(GroupLost):
            self._control.checkpoints.save_and_wait(
                self._state,
                self._group("steps"),
                lambda: must_leave() or time.monotonic() > deadline,
            )

    def _record(self, step: Step) -> LedgerRecord:
        group, samples = self._group("generation"), step.samples
        return LedgerRecord(
            step=self._state.committed,
            epoch=samples.epoch,
            generation=group.generation.number,
            world_size=group.world_size,
            start=samples.start,
            stop=samples.stop,
            run=group.generation.incarnation,
        )

    def _count_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1


_current: Session | None = None
_link: Link | None = None
_refusal = ""


def refuse(why: str) -> None:
    """Have elastic.init() raise ConfigurationError."""
    global _refusal
    _refusal = why


def use_link(link: Link) -> None:
    """The bootstrap's link to the agent, for elastic.init()."""
    global _link
    _link = link


def current() -> Session | None:
    """The process's session, once elastic.init() has been called."""
    return _current


def init() -> Session:
    """Take part in the job; a warm spare waits here until it is needed.

    Without an agent (`python train.py`) the script is a job of one worker. Calling it again
    returns the same session.
    """
    global _current
    if _refusal:
        raise ConfigurationError(_refusal)
    if _current is None:
        _current = Session(LocalControl() if _link is None else AgentControl(_link))
    return _current
