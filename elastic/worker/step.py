"""The user's API: one step, whose `with` block commits it when it ends."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch

from elastic.core.data_order import MicroBatch, SampleRange
from elastic.core.whereabouts import Place
from elastic.errors import StepMisused
from elastic.worker.data_loader import BatchPlan, BatchPlanner, to_device
from elastic.worker.training import Training

ONE_LOOP = (
    "use one loop at a time: let loops that alternate follow each other, each with max_steps=..., "
    "or take samples of a second dataset from a torch DataLoader"
)
_NO_MEANS: Mapping[str, float] = {}
_WEIGHT = "\0weight"
"""The name, which no value of `mean` has, under which the weights of losses are summed."""
_SKIP = "\0skip"
"""That under which bad micro-batches are counted."""


class Means(Mapping[str, float]):
    """The means that `step.mean` returns: by name (`means["loss"]`) or attribute (`means.loss`).

    They are known when the block has ended; StepMisused if one is read before. They are NaN after a
    step that does not count, and for names that `step.mean` was not given.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the block has ended, so that the means can be read."""
        return self._values is not None

    def settle(self, values: Mapping[str, float]) -> None:
        """Set the means. The step calls this when its block has ended."""
        self._values = {name: value for name, value in values.items() if not name.startswith("\0")}

    def __getitem__(self, name: str) -> float:
        if self._values is None:
            raise StepMisused(
                f"the mean of {name} was read inside of `with step:`; it is known when the block "
                "has ended"
            )
        return self._values.get(name, math.nan)

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values or ())

    def __len__(self) -> int:
        return len(self._values or ())


class Step:
    """A step of the job, as `session.steps` yields it.

    Leaving the block of `with step:` commits the step. If the group is lost inside, the block ends
    without an error, what it changed is undone, and the loop hands out the same samples again.

    Attributes:
        committed (bool): whether the step counts. Known when the block has ended. It can be True
            after the group was lost: others had completed the step.
        index (int): the number of steps that the job committed before this one.
        epoch (int): the epoch of its samples, from 0.
        ends_epoch (bool): whether it is the epoch's last step, with the same value on every worker.
    """

    def __init__(self, training: Training, planner: BatchPlanner, plan: BatchPlan) -> None:
        self._training = training
        self._loop = training.part.loop
        self._taken = 0  # micro-batches of this pass
        self._passed = 0  # micro-batches up to the last whose loss was passed to `backward`
        self._quiet_since: int | None = None
        """The number of collectives, which no micro-batch but the last one may change."""
        self._pass_began = self._passes_s = 0.0
        self._accumulates = False
        """The micro-batch that was taken last has had no backward pass yet."""
        self._batches: list[Any] = []
        """The batches fetched so far, in order: another pass over `batches` yields them again."""
        self._reduced = False
        self._entered = False
        self._outside: BaseException | None = None
        """The exception that the script handles around the block."""
        self._generator = 0
        self._means = Means()
        self._sums: dict[str, torch.Tensor] = {}
        self._given: set[str] = set()
        """The names given to `mean` since the last micro-batch was taken."""
        self._summed: list[tuple[list[str], torch.Tensor]] = []
        self._is_weighted = False
        """Losses of this pass have weights of their own."""
        self._weighed = 0
        """The micro-batch, counted from 1, whose loss was given a weight last."""
        self._skipped = False
        self._has_updated = False
        """An optimizer has begun to step, or the block has ended."""
        self._left_over: list[bool] = []
        """Of each model: it had gradients before this pass."""
        self.committed = False
        self._take(planner, plan)

    @property
    def samples(self) -> SampleRange:
        """The positions in the epoch's order that the whole group consumes in this step; its len()
        is the step's number of samples."""
        return self._samples

    @property
    def share(self) -> int:
        """The number of this rank's samples, without those of a stand-in. It may be 0."""
        return sum(len(m) for m in self._micro_batches if m.weighted)

    @property
    def counts(self) -> bool:
        """Whether the samples of the micro-batch that `batches` yielded last are this rank's. False
        for a stand-in, whose loss has weight zero. StepMisused if none was taken."""
        return self._current("counts").weighted

    @property
    def positions(self) -> range:
        """The positions of these samples in the epoch's order, as in `samples`. StepMisused if no
        micro-batch was taken."""
        taken = self._current("positions")
        return range(taken.start, taken.stop)

    @property
    def indices(self) -> list[int]:
        """The dataset's indices of these samples, in the order of the batch. StepMisused if no
        micro-batch was taken."""
        taken = self._current("indices")
        return self._planner.indices(self._samples.epoch, range(taken.start, taken.stop))

    def batches(self) -> Iterator[Any]:
        """Iterate over this rank's micro-batches, as collate_fn returns them, on `session.device`.
        Each has at most `batch_size` samples.

        Only the backward pass of the last one all-reduces. Ranks may have different numbers of
        them. A rank without samples gets a stand-in of weight zero (`counts` is False), because
        the other ranks need it in their collectives. After the last one, another call yields the
        same batches again, as for a second model. Before that, another call goes on with the next
        micro-batch.

        Raises StepMisused outside of `with step:`, if the loss of the previous micro-batch was not
        passed to `backward`, or if the script called a collective for it.
        """
        if not self._entered:
            raise StepMisused("step.batches() was called outside of `with step:`")
        last = len(self._micro_batches) - 1
        if self._taken > last:
            self._taken = self._passed = 0
        training = self._training
        try:
            for number in range(self._taken, last + 1):
                self._begin_micro_batch(number, last)
                began = time.monotonic()
                training.place.now = Place.DATA, began
                if number == len(self._batches):
                    self._batches.append(self._planner.fetch())
                batch = self._batches[number]
                fetched = time.monotonic()
                clock = training.clock
                clock.spent.fetched(began, fetched, counts=number < self._plan.fewest)
                batch = to_device(batch, training.control.backend.device)
                now = self._pass_began = time.monotonic()
                training.place.now = Place.FORWARD, now
                clock.pace.transfer_s += now - fetched
                training.in_batches = self._planner.divides
                yield batch
        finally:
            training.in_batches = False

    def backward(
        self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **options: Any
    ) -> None:
        """Call `loss.backward(**options)`, with the loss weighted by its share of the global batch.

        loss: a scalar, the mean over the samples of the micro-batch that `batches` yielded last.
        The averaged gradient is then the exact mean over the global batch, also with uneven shares.
        weight: what the loss is the mean over if that is not the samples: the number of its tokens,
        boxes or pixels, or the sum of their weights, as a number or a tensor of one element. The
        averaged gradient is then the exact mean over all of these in the global batch; if there are
        none, it is zero. With the loss of a micro-batch that has none, weight is 0, and the loss
        must be finite. Pass it for each micro-batch, or for none.
        options: those of torch.Tensor.backward, such as retain_graph.

        Raises StepMisused if no micro-batch was taken, if only some have a weight, if a weight is
        negative or not finite, if gradients of earlier steps are left where losses have weights, or
        if a generator that has the `with step:` waits in its `yield`.
        """
        if self._taken == 0:
            raise StepMisused(
                "step.backward() was called before a batch was taken from step.batches()"
            )
        if not self._reduced:
            self._require_block_around(sys._getframe(1))
            self._training.before_backward()
        if self._planner.divides and self._accumulates:
            self._accumulates = False
            self._training.models.require_accumulated()
        factor = self._factor_of(weight)
        last = self._taken == len(self._micro_batches)
        self._passed = self._taken
        began = time.monotonic()
        self._training.place.now = Place.BACKWARD, began
        try:
            sums = self._begin_sums(self._given) if last else None
            reductions = self._training.begin_backward(averages=last)
            begun = 0
            try:
                _scaled(loss, factor).backward(**options)  # type: ignore[no-untyped-call]
            finally:
                self._training.in_backward = False
                if last:
                    begun = reductions.end_pass()
            if last:
                if not begun or not reductions.are_usual():
                    reductions.require_averaged(begun, loss)
                if sums is not None:
                    sums.wait()
                self._training.wait_for_reduction(reductions.newest)
                if self._is_weighted:
                    averaged = reductions.models_of_last_pass()
                    self._training.models.multiply_gradients(
                        self._correction(), averaged, self._left_over
                    )
                if sums is not None:
                    self._leave_out()
                self._reduced = True
        except Exception as error:
            self._training.note_failure(error)
            raise
        now = time.monotonic()
        self._training.place.now = Place.OPTIMIZER if last else Place.FORWARD, now
        if self._plan.most > 1:
            self._note_pass(began, now, last)
        if last:
            self._training.clock.pace.reduced(began, now)

    def mean(
        self,
        /,
        *unnamed: object,
        weight: torch.Tensor | float | None = None,
        **values: torch.Tensor | float,
    ) -> Means:
        """Return the exact means of values over the global batch, known when the block has ended.

        values: numbers or tensors of one element by name, each the mean over the samples of the
        micro-batch that `batches` yielded last. Call this once for each micro-batch, with the same
        names on every rank, even on one whose `share` is 0: otherwise gloo ends the process. Values
        given before `backward` are summed along with the gradients; later ones need another
        collective.
        weight: what the values are means over if that is not the samples, as for `backward`.

        Raises StepMisused if no micro-batch was taken, if a value has no name, or if the weight is
        negative or not finite.
        """
        _require_names(unnamed, "mean")
        if self._taken == 0:
            raise StepMisused("step.mean() was called before a batch was taken from step.batches()")
        micro_batch = self._micro_batches[self._taken - 1]
        count: torch.Tensor | float = len(micro_batch)
        if weight is not None:
            count = self._checked(weight, "step.mean")
        if not micro_batch.weighted:
            count = 0
        for name, value in values.items():
            mean = self._number(value)
            has_none = isinstance(count, (int, float)) and count == 0  # the mean may be NaN then
            self._add(name, torch.zeros_like(mean) if has_none else mean * count, count)
        self._given.update(values)
        return self._means

    def skip(self, bad: torch.Tensor | bool) -> None:
        """Say whether the micro-batch that `batches` yielded last is to be left out, as for a loss
        that is NaN: `step.skip(~loss.isfinite())`. If any micro-batch of any worker is, the step
        changes no weights: the gradients of all distributed models become None, those of earlier
        steps too, which optimizers pass over. The step counts and its samples are consumed, as when
        torch's GradScaler skips one. `skipped` tells, on every worker alike.

        bad: whether it is, as a bool or a tensor of one element. Call this for each micro-batch and
        on every worker, as `mean`; best before `backward`, with whose gradients the answer then
        travels. Gradients of one bad micro-batch would reach all workers. BatchNorm's statistics
        have seen the batch: where inputs are bad, replace them, too. A GradScaler that is enabled
        leaves out steps that are not finite by itself, and raises where no gradients are left: call
        its methods below `if not step.skipped:`, or do without this one.

        Raises StepMisused if no micro-batch was taken, or an optimizer has stepped already.
        """
        if self._taken == 0:
            raise StepMisused("step.skip() was called before a batch was taken from step.batches()")
        if self._has_updated:
            raise StepMisused(
                f"step {self.index}: step.skip() was called after optimizer.step(), which has "
                "changed the weights; call it above step.backward()"
            )
        self._add(_SKIP, self._number(bad), 1.0)
        self._given.add(_SKIP)

    @property
    def skipped(self) -> bool:
        """Whether `skip` was given a bad micro-batch on any worker. Known when the last loss was
        passed to `backward`; for answers given later, when an optimizer steps or the block ends."""
        return self._skipped

    @property
    def means(self) -> Means:
        """What `mean` returns: the means that were given in this step."""
        return self._means

    def report(self, /, *unnamed: object, **values: Any) -> None:
        """Show values (loss=..., accuracy=...) in the live line, the status and the metrics.

        values: numbers or tensors of one element by name; others are ignored. Tensors are read
        later, in the background, and only the newest one of each name. After a block that does not
        count the values are ignored: the step is computed again.

        Raises StepMisused if a value has no name.
        """
        _require_names(unnamed, "report")
        if self.committed or not self._means.is_settled:
            self._training.control.reports.report(values, committed=self.committed)

    def every(self, n: int) -> bool:
        """Whether this is an n-th committed step of the job: step n, 2 n, 3 n... The answer is the
        same on every worker, and after a retry or a resume. Below a block that does not count it is
        False.

        Raises StepMisused unless n is a whole number, at least 1.
        """
        if not isinstance(n, numbers.Integral) or isinstance(n, bool) or n < 1:
            raise StepMisused(f"step.every({n!r:.60}): give a whole number of steps, at least 1")
        counts = self.committed or not self._means.is_settled
        return counts and (self.index + 1) % int(n) == 0

    def __enter__(self) -> Step:
        if self._entered:
            raise StepMisused(
                f"step {self.index} has a second `with step:`, but one block commits it; do all of "
                "it in one block, or take the next step from session.steps()"
            )
        if self._loop != self._training.part.loop:
            raise StepMisused(
                f"step {self.index} belongs to a loop over session.steps() while another loop has "
                f"begun (nested or interleaved); {ONE_LOOP}"
            )
        self._training.tell_group_change()  # the code above the block may have called session.run
        if (fresh := self._training.loops.other_plan(self._planner)) is not None:
            self._take(*fresh)
        self._entered = True
        self._outside = sys.exc_info()[1]
        self._generator = _generator_of(sys._getframe(1))
        self._training.begin_block(self.reduce_means)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        now = time.monotonic()
        self._training.place.now = Place.COMMIT, now
        pace = self._training.clock.pace
        pace.after_s += now - pace.reduced_at
        try:
            if error is None or isinstance(error, Exception):
                error = self._training.loss_in_block or error
            if error is None:
                error = self._end()
            if error is None:
                return False
            loss = self._training.losses.behind(error, self._outside)
            if loss is None:
                return False
            self.committed = self._training.give_up_block(loss)
            means: Mapping[str, float] = {}
            self.ends_epoch = False  # of a step that does not count
            if self.committed:
                means = self._training.state.means
                self._follow()
            self._skipped = means.get(_SKIP, 0.0) > 0.0
            self._means.settle(means)
            return True
        finally:
            self._batches.clear()
            self._training.leave_block()

    # ---- for the training loop

    @property
    def was_entered(self) -> bool:
        """Whether the script has used `with step:`."""
        return self._entered

    def reduce_means(self) -> bool:
        """Sum the values given to `mean` that were not summed along with gradients. Blocks until
        they are summed. Returns False if there are none."""
        self._has_updated = True
        work = self._begin_sums(self._sums)
        if work is not None:
            work.wait()
            self._leave_out()
        return work is not None

    # ---- inside

    def _take(self, planner: BatchPlanner, plan: BatchPlan) -> None:
        """Take the step's samples, also after a change of group has divided them again."""
        self._planner = planner
        self._plan = plan
        self._samples, self._micro_batches = plan.samples, plan.micro_batches
        self._weights = plan.weights
        self.index = self._training.state.committed
        self.epoch = plan.samples.epoch
        self.ends_epoch = plan.ends_epoch

    def _current(self, what: str) -> MicroBatch:
        if self._taken == 0:
            raise StepMisused(f"step.{what} was read before a batch was taken from step.batches()")
        return self._micro_batches[self._taken - 1]

    def _begin_micro_batch(self, number: int, last: int) -> None:
        """The script takes micro-batch `number` of those from 0 to `last`."""
        training = self._training
        if self._passed < number:
            raise StepMisused(
                f"step {self.index}: a micro-batch was taken from step.batches() before the "
                "loss of the previous one was passed to step.backward(), which uses the weight "
                "of the last one taken; call step.backward() inside of "
                "`for ... in step.batches():`"
            )
        if self._plan.quiet:
            if number == 0:
                training.models.broadcast_first()
                self._quiet_since = training.collectives()
            elif self._quiet_since is not None and self._quiet_since != training.collectives():
                raise StepMisused(
                    f"step {self.index}: a collective of torch.distributed was called for "
                    f"micro-batch {number} of {last + 1}, or the model was called without a "
                    "backward pass, after which DDP averages too early. Another rank may have "
                    "fewer micro-batches, and would not take part: call collectives below `for ... "
                    "in step.batches():` (step.mean() needs none), and the model for other "
                    "purposes under torch.no_grad(); or create the loader with "
                    "elastic.DataLoader(..., equal_passes=True), which makes the numbers equal by "
                    "stand-ins (step.counts is False for them)"
                )
        training.models.reduce_gradients(number == last)
        if number == 0 and self._planner.divides:
            training.models.keep_accumulated(ends_only=True)
        self._accumulates = True
        self._weighed = 0
        self._given.clear()
        self._taken += 1

    def _note_pass(self, began: float, now: float, last: bool) -> None:
        """A backward pass has ended, which began at `began`. A rank that has more passes than
        another by the division of the samples is not slow: what these take counts as a wait."""
        pace = self._training.clock.pace
        local = pace.arrival.at if last and pace.arrival.at > began else now
        self._passes_s += local - self._pass_began
        self._pass_began = now
        if last:
            own = len(self._micro_batches)
            pace.wait_s += self._passes_s * (own - self._plan.fewest) / own
            self._passes_s = 0.0
        else:
            self._training.models.keep_accumulated()

    def _end(self) -> Exception | None:
        """Commit the step. Returns the error if the group is lost only now."""
        if not self._reduced or 0 < self._passed < len(self._micro_batches):
            raise StepMisused(
                f"step {self.index} ended without an averaged gradient: take every micro-batch "
                "from step.batches() and pass each loss to step.backward(loss)"
            )
        try:
            if self._sums:
                self.reduce_means()
            means = self._settled_means() if self._summed else _NO_MEANS
            self._training.commit(self._samples, means)
        except Exception as error:
            if not self._training.losses.is_loss(error):
                raise
            return error
        self.committed = True
        self._means.settle(means)
        return None

    def _follow(self) -> None:
        """Set the attributes to the step that counts: a later one, if the others went on."""
        training = self._training
        position = training.part.position
        self.index = training.part.progress.committed - 1
        self.epoch = position.epoch
        self.ends_epoch = training.loops.at_epoch_end(position, training.world_size)

    def _factor_of(self, weight: torch.Tensor | float | None) -> torch.Tensor | float:
        """What to multiply the loss of this micro-batch by.

        The sum of all weights is known only after the reduction. Until then, one number that is
        equal on all ranks stands for its part of a rank: that of the step before, so that
        gradients are of the usual size while they are reduced.
        """
        if self._taken == 1:
            self._is_weighted = weight is not None
            self._left_over = self._training.models.have_gradients() if self._is_weighted else []
        if self._is_weighted != (weight is not None):
            raise StepMisused(
                f"step {self.index}: step.backward() was given a weight for some micro-batches and "
                "none for others; pass weight=... for each, or for none"
            )
        if weight is None:
            return self._weights[self._taken - 1]
        if self._weighed == self._taken:
            raise StepMisused(
                f"step {self.index}: two losses of one micro-batch were passed to step.backward() "
                "with weights, which would count its tokens twice; add the losses, or pass the "
                "second one in another `for ... in step.batches():`, as for a second model"
            )
        self._weighed = self._taken
        counts = self._micro_batches[self._taken - 1].weighted
        given = self._checked(weight, "step.backward") if counts else 0.0
        is_last = self._taken == len(self._micro_batches)
        self._add(_WEIGHT, given, 1.0 if is_last else 0.0)  # its mean is that of the ranks' sums
        self._given.add(_WEIGHT)
        return given / self._unit()

    def _unit(self) -> float:
        before: float = self._training.state.means.get(_WEIGHT, 0.0)
        return before or len(self._samples) / self._training.world_size

    def _correction(self) -> torch.Tensor:
        """What to multiply the averaged gradients by, now that all weights are summed."""
        names, flat = self._summed[-1]
        total = flat[2 * names.index(_WEIGHT)]
        ours = self._unit() * self._training.world_size
        return torch.where(total > 0, ours / total, torch.zeros_like(total))

    def _number(self, value: torch.Tensor | float) -> torch.Tensor:
        device = self._training.control.backend.device
        return torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(())

    def _add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Add to the sums of this rank, whose quotient over all ranks is the mean."""
        pair = torch.stack([self._number(total), self._number(count)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def _checked(self, weight: torch.Tensor | float, what: str) -> torch.Tensor | float:
        """Raise StepMisused for a bad weight. One on a device is not read, which would wait."""
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1:
                raise StepMisused(
                    f"{what}() was given a weight of shape {tuple(weight.shape)}; it must have one "
                    "element"
                )
            if weight.device.type != "cpu":
                return weight.detach().double().reshape(())
        try:
            number = float(weight)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number < math.inf:
            raise StepMisused(
                f"{what}() was given the weight {weight!r:.60}; it must be a number that is finite "
                "and not negative: how many tokens, boxes or pixels the mean is over"
            )
        return number

    def _require_block_around(self, frame: FrameType | None) -> None:
        """Raise StepMisused if the block belongs to a generator that waits for its caller."""
        if not self._generator:
            return
        while frame is not None:
            if id(frame) == self._generator:
                return
            frame = frame.f_back
        raise StepMisused(
            "step.backward() was called while the generator that has `with step:` waits in its "
            "`yield`: if the group is lost, the block is not notified, and the error ends the "
            "script; let the generator do the backward pass, or turn it into a function with "
            "@contextlib.contextmanager that yields once"
        )

    def _begin_sums(self, given: Collection[str]) -> Any:
        """Begin to all-reduce the values given to `mean` since the last time, of these names.
        Returns the work to wait for, or None if there are none.

        Along with gradients go only names given for the last micro-batch: others may be given after
        each backward pass, and a rank with one micro-batch does not have them yet.
        """
        if not self._sums or not given:
            return None
        names = sorted(given)
        flat = torch.cat([self._sums.pop(name) for name in names])
        self._given.clear()
        self._summed.append((names, flat))
        return self._training.all_reduce(flat)

    def _leave_out(self) -> None:
        """Drop the gradients if the values that were just summed count a bad micro-batch."""
        names, flat = self._summed[-1]
        if _SKIP not in names:
            return
        self._training.require_group().settle()
        if float(flat[2 * names.index(_SKIP)]) > 0:
            self._skipped = True
            self._training.models.drop_gradients()

    def _settled_means(self) -> dict[str, float]:
        """The means, once all sums are complete."""
        totals: dict[str, list[float]] = {}
        for names, flat in self._summed:
            for name, (total, count) in zip(names, flat.view(-1, 2).tolist(), strict=True):
                before = totals.get(name, [0.0, 0.0])
                totals[name] = [before[0] + total, before[1] + count]
        return {n: total / count if count else math.nan for n, (total, count) in totals.items()}


def _require_names(unnamed: tuple[object, ...], method: str) -> None:
    if unnamed:
        raise StepMisused(
            f"step.{method}() was given {unnamed[0]!r:.60} without a name; write "
            f"step.{method}(loss=loss)"
        )


def _scaled(loss: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    if isinstance(factor, torch.Tensor):
        return loss * factor.to(loss.dtype)
    return loss if factor == 1.0 else loss * factor


def _generator_of(frame: FrameType) -> int:
    """The id of this frame if it is that of a generator whose caller raises no exceptions into it,
    else 0. The frame itself must not be kept: it holds all of the script's variables."""
    back: FrameType | None = frame
    while back is not None and back.f_code.co_flags & inspect.CO_GENERATOR:
        back = back.f_back  # a generator that delegates by `yield from` passes exceptions on
    if back is frame or back is None:
        return 0
    return 0 if back.f_code.co_filename == contextlib.__file__ else id(frame)
