"""Hands the job's steps to the loop of one `Trainer.fit`, and lets the loop repeat lost ones.

A batch of the loop is a step of the job: its block begins where the loop takes the batch, and ends
in `optimizer_step`. The loop's state there, inside of `advance`, is what the job tracks. If the
group is lost, elastic puts that state back, `advance` is left and begun again, and takes the same
samples as they are divided in the next group. A worker that joins, or that begins from a
checkpoint, goes through the script to its first `advance`, where the state arrives.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.utils.data import Subset

from elastic.lightning.loggers import Rows
from elastic.lightning.metrics import StepMetrics
from elastic.lightning.reduction import Reduction
from elastic.lightning.refusals import refuse, require_loader
from elastic.lightning.results import GroupResults
from elastic.lightning.tracked import TrainerState
from elastic.worker.data_loader import DataLoader
from elastic.worker.session import Session
from elastic.worker.step import Step


class _GivenUp(BaseException):
    """Leaves `advance`: the group was lost in the step, which does not count. No Exception, so
    that no hook takes it for one of its own."""


class _NothingLeft(BaseException):
    """Leaves the fit: the job has no step left in it, as for a worker that joins at its end."""


class Batches:
    """The training batches as Lightning sees them: one for each step of the job."""

    worker_init_fn: Any = None  # Lightning sets it for seed_everything(workers=True)

    def __init__(self, fit: Fit, length: int) -> None:
        self._fit, self._length = fit, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        return self._fit.next_batch()


class Fit:
    """One `Trainer.fit`.

    follow_group: called whenever the group may have changed.
    """

    def __init__(
        self,
        session: Session,
        trainer: Any,
        *,
        state: TrainerState,
        results: GroupResults,
        metrics: StepMetrics,
        rows: Rows,
        follow_group: Callable[[], None],
    ) -> None:
        self._session, self._trainer = session, trainer
        self._state, self._results, self._metrics, self._rows = state, results, metrics, rows
        self._follow_group = follow_group
        self._data: DataLoader | None = None
        self._steps: Iterator[Step] | None = None
        self._step: Step | None = None
        """The step whose block is open."""
        self._micro_batches: Iterator[Any] = iter(())

    @property
    def in_block(self) -> bool:
        """Whether a step's block is open."""
        return self._step is not None

    # ---- in place of methods of Lightning's loops

    def batches(self, loader: object) -> Batches:
        """What the loop iterates over, for the script's training loader."""
        data = require_loader(loader)
        if (part := self._trainer.overfit_batches) > 0:
            data = _first_batches(data, part)
        self._data = data
        return Batches(self, len(data))

    def run(self, run: Callable[[], None]) -> None:
        """In place of `fit_loop.run`."""
        try:
            run()
        except _NothingLeft:
            pass
        else:
            self._end()
        if self._session._training.part.loop < 0:
            return  # nothing was to be trained
        # What follows this fit, also a second one, begins with what the Trainer knows now: a worker
        # that has passed a fit that is done gets it as the result of this call.
        passed = self._session._training.part.holds_back
        known = self._session.run(self._state.state_dict)
        if passed:
            self._state.load_state_dict(known)

    def form_group(self) -> None:
        """Before the loop's first hook: an empty loop over steps forms the group, so that the hooks
        know the rank. No worker has to wait for long from here on."""
        if self._data is not None and self._session._training.part.loop < 0:
            for _ in self._session.steps(self._data, epochs=0):
                pass
        self._follow_group()

    def advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        """In place of the epoch loop's `advance`: repeat it for a step that does not count."""
        module = self._trainer.lightning_module
        hook = module._current_fx_name
        while True:
            try:
                advance(fetcher)
            except _GivenUp:
                pass
            except StopIteration:
                if self._step is not None:
                    refuse(
                        "on_train_batch_start() returned -1, which",
                        "skips samples that other workers count; set trainer.should_stop, or "
                        "Trainer(limit_train_batches=...)",
                    )
                raise
            except Exception:
                if self._step is None or not self._leave_block(*sys.exc_info()):
                    raise
            else:
                return
            module._current_fx_name = hook
            fetcher.done = False  # if it was the epoch's last batch

    def next_batch(self) -> Any:
        """Begin the next step of the job, and return this worker's first micro-batch of it."""
        if self._step is not None:
            refuse(
                f"batch {self._trainer.fit_loop.batch_idx} ended without a step of the optimizer,",
                "but each batch is a step of the job; call optimizer.step(closure=closure) in "
                "every optimizer_step()",
            )
        if self._steps is None:
            self._steps = self._begin()
        step = next(self._steps, None)
        self._follow_group()
        if step is None:
            raise _NothingLeft
        if self._state.was_loaded:
            self._state.settle()
        loop = self._trainer.fit_loop
        assert loop._data_fetcher is not None
        loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
        step.__enter__()
        self._step = step
        self._rows.begin(step.index)
        self._results.begin(step)
        self._metrics.begin(step)
        self._micro_batches = step.batches()
        return next(self._micro_batches)

    # ---- in place of methods of the strategy

    def backward(self, loss: torch.Tensor, unscaled: torch.Tensor, **options: Any) -> None:
        """Compute gradients, weighted by this worker's share. unscaled: the loss itself."""
        assert self._step is not None
        self._results.add_loss(unscaled)
        self._step.backward(loss, **options)

    def optimizer_step(self, optimizer: Any, closure: Any, update: Callable[[Any], Any]) -> Any:
        """Compute the step's micro-batches, update the model and leave the step's block.

        update: lets the precision plugin step the optimizer; it takes what stands for the closure.
        """
        if not isinstance(closure, Closure):
            refuse(
                f"optimizer_step() was given a closure of type {type(closure).__name__},",
                "but elastic calls Lightning's own for each micro-batch; pass on the one that the "
                "hook optimizer_step() gets",
            )
        step = self._step
        if step is None:
            refuse(
                "optimizer.step() was called twice for a batch,",
                "but each batch is a step of the job; call it once in optimizer_step()",
            )
        output = None
        try:
            loss = self._compute(closure)
            self._reduce()
            output = update(lambda: loss)
            optimizer.zero_grad()
            self._leave_block(None, None, None)
        except Exception:
            if self._step is None or not self._leave_block(*sys.exc_info()):
                raise
            optimizer.zero_grad()
        if not step.committed:
            raise _GivenUp
        mean = torch.tensor(self._results.loss, device=self._session.device)
        if closure._result is None:  # the others have completed the step
            closure._result = ClosureResult(None)
        closure._result.loss = mean
        self._results.batch_size = len(step.samples)  # of what is logged below the block
        step.report(loss=mean)
        return output

    # ---- inside

    def _begin(self) -> Iterator[Step]:
        """The steps up to the end that Lightning's arguments set."""
        assert self._data is not None
        trainer, loop = self._trainer, self._trainer.fit_loop
        left = []
        if loop.max_epochs is not None and loop.max_epochs >= 0:
            epochs = loop.max_epochs - loop.epoch_progress.current.processed
            left.append(epochs * int(loop.max_batches))
        if trainer.max_steps >= 0:
            left.append(trainer.max_steps - trainer.global_step)
        most = min(left) if left else None
        return self._session.steps(self._data, epochs=None, max_steps=most)

    def _end(self) -> None:
        """The loop has ended: end the one over the job's steps. If it was stopped early, as by
        EarlyStopping, it is left as by `break`, on every worker after the same step."""
        if self._steps is None:
            return
        training = self._session._training
        if training.loops.steps_left(training.part) == 0:
            for step in self._steps:
                raise AssertionError(f"step {step.index} follows the last one of the fit")
        else:
            self._steps.close()  # type: ignore[attr-defined]
        self._steps = None

    def _compute(self, closure: Closure) -> Any:
        """Compute the gradients of all micro-batches. Returns the last one's loss."""
        kwargs: OrderedDict[str, Any] = closure._step_fn.args[0]  # type: ignore[attr-defined]
        loss = self._call(closure)
        closure._zero_grad_fn = None
        for batch in self._micro_batches:
            trainer, module = self._trainer, self._trainer.lightning_module
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            kwargs["batch"] = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            self._results.next_batch(kwargs["batch"])
            loss = self._call(closure)
        return loss

    def _call(self, closure: Closure) -> Any:
        loss = closure()
        if loss is None:
            refuse(
                "training_step() returned None, which",
                "skips a batch on one worker only; for a batch without a usable sample return a "
                "loss times zero, as in (self(x) * 0).sum()",
            )
        self._metrics.after_batch()
        return loss

    def _reduce(self) -> None:
        """Reduce what was logged, and the metrics, over the group. From here on no loss of the
        group can take the step back."""
        reduction = Reduction(self._session.device)
        self._metrics.collect(reduction)
        self._results.collect(reduction)
        reduction.make()
        self._session._training.wait_for_reduction()
        self._metrics.take()
        self._results.take()

    def _leave_block(self, kind: Any, error: Any, trace: Any) -> bool:
        """Leave the step's block. Returns whether the error was that of a lost group."""
        step, self._step = self._step, None
        assert step is not None
        self._results.give_up()
        self._metrics.give_up()
        absorbed = step.__exit__(kind, error, trace)
        self._follow_group()
        if step.committed:
            self._rows.commit()
        else:
            self._rows.give_up()
        return absorbed


def _first_batches(data: DataLoader, part: int | float) -> DataLoader:
    """A loader of the first batches alone, in order, as Trainer(overfit_batches=...) wants it."""
    size = data.policy.global_batch(1)
    batches = part if isinstance(part, int) else max(1, int(len(data) * part))
    samples = range(min(data.length, batches * size))
    return DataLoader(
        Subset(data.dataset, samples),
        data.policy.batch_size,
        global_batch=min(size, len(samples)),
        shuffle=False,
        **data._options,
    )
