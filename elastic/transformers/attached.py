"""Puts a job's steps into the loop of a Trainer, by replacing some methods of that one object.

Trainer takes an item from its loader: that is the boundary between two steps. `training_step`
opens the step's block and passes its micro-batches. Trainer clips gradients and updates the model,
and the first callback's `on_step_end` closes the block. If the group is lost in between, the error
unwinds Trainer's `_run_epoch`, which is called again for the rest of the epoch: with the same step,
or, if others have completed that one, with what follows a step (logs, an evaluation, a save). A
worker that joins begins with the rest of an epoch, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils import data as torch_data
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from elastic.errors import ConfigurationError, NotInGroup
from elastic.transformers import refusals
from elastic.transformers.evaluation import BatchShard, Rounds, shard_of
from elastic.transformers.tracked import History, Progress
from elastic.worker.data_loader import DataLoader
from elastic.worker.session import Session

_SEAMS = {
    "train": "refuses what contradicts elastic; a step's micro-batches are one item of the loader",
    "get_train_dataloader": "its samples are divided by an elastic.DataLoader",
    "get_total_train_batch_size": "is the global batch",
    "_init_training_state": "the group forms here, and a worker that joins gets its state",
    "_prepare_for_training": "has been called by then, because the group needs what it makes",
    "_run_epoch": "goes on with the rest of the epoch after a loss of the group",
    "training_step": "passes a step's micro-batches to Trainer's own method, one by one",
    "floating_point_ops": "counted for each micro-batch, and summed over the group",
    "_track_num_input_tokens": "counted for each micro-batch, and summed over the group",
    "_clip_grad_norm": "leaves out a step that other workers have completed",
    "_get_grad_norm": "is that of the group, also in such a step",
    "_get_learning_rate": "is that of the group, also in such a step",
    "_finalize_training": "ends the loop over session.steps",
    "_evaluate": "eval_on_start, which only a job's first workers do, needs no other worker",
    "evaluation_loop": "collects results in session.run, so in the next group if one is lost",
    "_get_eval_sampler": "each rank evaluates a part",
    "_save_checkpoint": "one worker writes, in session.run, so another one if it is lost",
    "_load_best_model": "one worker reads, and the others receive",
}
"""The methods that are replaced, and why. Beside these, three of the accelerator's: `backward`
passes losses to step.backward, `gather_for_metrics` collects the results of an evaluation, and
`unwrap_model` knows the distributed model."""


def attach(trainer: Any, session: Session, *, global_batch: int | None = None) -> None:
    """Make `trainer.train()` train in the job of `session`, and recover in process from losses.

    trainer: a transformers.Trainer, or of a subclass, made as usual.
    global_batch: the samples of an optimizer's step, at least 1, whatever the size of the group.
    By default per_device_train_batch_size x gradient_accumulation_steps x the workers with which
    this node was started. With workers on several nodes it must be given.

    Raises ConfigurationError for arguments of the trainer that are not supported, and with
    trainer.train() for those that only it can know.
    """
    refusals.require_fit(trainer)
    refusals.require_seams(trainer, _SEAMS)
    if not isinstance(session, Session):
        raise ConfigurationError(
            f"attach(trainer, {type(session).__name__}): give what elastic.init() has returned"
        )
    if hasattr(trainer, "_elastic"):
        raise ConfigurationError(
            "attach() was called again for the same trainer; call it once, above train()"
        )
    if global_batch is not None and (not isinstance(global_batch, int) or global_batch < 1):
        raise ConfigurationError(
            f"attach(global_batch={global_batch!r}): give the samples of a step, at least 1"
        )
    trainer._elastic = _Attached(trainer, session, global_batch)


class _StepAgain(Exception):
    """The step's block does not count: its epoch goes on with the same step."""


class _Attached:
    """A trainer's part in the job. Its public methods take the place of the trainer's."""

    def __init__(self, trainer: Any, session: Session, global_batch: int | None) -> None:
        self._trainer, self._session = trainer, session
        self._asked_batch = global_batch
        self._own: dict[str, Callable[..., Any]] = {n: getattr(trainer, n) for n in _SEAMS}
        """Trainer's own methods, which those of this class call."""
        for name in _SEAMS:
            setattr(trainer, name, getattr(self, name.lstrip("_")))
        accelerator = trainer.accelerator
        self._own_gather = accelerator.gather_for_metrics
        self._own_unwrap = accelerator.unwrap_model
        accelerator.backward = self._backward
        accelerator.gather_for_metrics = trainer.gather_function = self._gather
        accelerator.unwrap_model = self._unwrap
        trainer.callback_handler.callbacks.insert(0, _FirstCallback(self))
        self._progress, self._history = Progress(trainer), History(trainer)
        self._model: Any = None
        self._data: DataLoader | None = None
        self._steps: Iterator[Any] = iter(())
        self._step: Any = None
        self._next: Any = None
        """The first step of train(), until Trainer's loop comes to it."""
        self._in_block = False
        self._owed = False
        """The step counts, because others have completed it. What follows a step is still to do."""
        self._weight: torch.Tensor | None = None
        self._counts: dict[str, float] = {}
        self._rounds: Rounds | None = None
        self._is_alone = False
        self._is_writer: bool | None = None
        self._reports = False
        """Reporting callbacks have begun, where this worker is the one that reports."""
        self._use_device()
        self._follow_group()

    # ---- in place of Trainer's: the loop

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **named: Any
    ) -> Any:
        refusals.require_fit_run(resume_from_checkpoint, trial)
        args = self._trainer.args
        refusals.require_fit(self._trainer)
        accumulate = args.gradient_accumulation_steps
        self._workers = self._session.local_world_size
        self._global_batch = self._asked_batch or (
            args.per_device_train_batch_size * accumulate * self._workers
        )
        args.gradient_accumulation_steps = 1
        try:
            return self._own["train"](None, None, *more, **named)
        finally:
            args.gradient_accumulation_steps = accumulate
            self._reports = False

    def get_train_dataloader(self) -> _Steps:
        self._data = self._divided(self._own["get_train_dataloader"]())
        return _Steps(self, self._data)

    def get_total_train_batch_size(self, _args: Any) -> int:
        return self._global_batch

    def init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, _resume: object, trial: object
    ) -> tuple[int, int]:
        trainer, session = self._trainer, self._session
        assert self._data is not None
        self._own["_init_training_state"](max_steps, per_epoch, epochs, None, trial)
        trainer.model_wrapped = trainer.model
        loader = _Steps(self, self._data)
        model, _ = self._own["_prepare_for_training"](max_steps, loader, None)
        self._share(model)
        trainer.model_wrapped = self._model
        self._progress.begin(session.committed)
        self._history.state_dict()
        self._steps = iter(session.steps(self._data, max_steps=max_steps))
        self._step, self._owed = None, False
        self._next = next(self._steps, None)
        self._at_begin = self._progress.state_dict()
        self._follow_group()
        self._require_one_node()
        return epochs if self._next is None else self._next.epoch, 0

    def prepare_for_training(self, _max_steps: int, loader: Any, _resume: object) -> Any:
        return self._model, loader

    def run_epoch(self, **named: Any) -> None:
        while True:
            try:
                self._own["_run_epoch"](**named)
                break
            except BaseException as error:
                if not self._absorbs(error):
                    raise
            self._owed = self._step.committed
            self._follow_group()
        if self._trainer.control.should_epoch_stop:
            raise ConfigurationError(
                "a callback has set control.should_epoch_stop: every sample of an epoch counts "
                "exactly once, so it cannot be ended early; set should_training_stop, or give "
                "TrainingArguments(max_steps=...)"
            )

    def training_step(self, model: Any, _inputs: Any, _num_items: Any = None) -> torch.Tensor:
        trainer = self._trainer
        if self._owed:  # let Trainer pass over what updates the model
            trainer.accelerator.gradient_state._set_sync_gradients(False)
            trainer.optimizer._is_overflow = True
            return torch.zeros_like(trainer._tr_loss)
        self._step.__enter__()
        self._in_block = True
        for batch in self._step.batches():
            number = trainer._get_num_items_in_batch([batch], trainer.args.device)
            scaled = trainer.loss_is_scaled_for_ga
            if scaled is None:
                scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
            self._weight = number if scaled else None
            self._counts = self._counted(batch)
            if number is not None:  # of a micro-batch without labels, the loss must be finite
                number = number.clamp(min=1)
            self._own["training_step"](model, batch, number)
        return torch.zeros_like(trainer._tr_loss)

    def floating_point_ops(self, _inputs: Any) -> float:
        return 0.0

    def track_num_input_tokens(self, _inputs: Any) -> None:
        pass

    def clip_grad_norm(self, model: Any) -> Any:
        return None if self._owed else self._own["_clip_grad_norm"](model)

    def get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if not self._owed:
            self._progress.grad_norm = self._own["_get_grad_norm"](model, grad_norm=grad_norm)
        return self._progress.grad_norm

    def get_learning_rate(self) -> float:
        if not self._owed:
            self._progress.learning_rate = self._own["_get_learning_rate"]()
        rate: float = self._progress.learning_rate
        return rate

    def finalize_training(self, *arguments: Any) -> Any:
        state = self._trainer.state
        if state.global_step < state.max_steps:  # a callback has stopped the training
            self._steps.close()  # type: ignore[attr-defined]
        else:
            next(self._steps, None)
        self._follow_group()
        return self._own["_finalize_training"](*arguments)

    # ---- in place of Trainer's: evaluation

    def evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> Any:
        if not skip_scheduler:
            return self._own["_evaluate"](trial, ignore_keys)
        if self._trainer.state.global_step:
            return {}
        self._is_alone = True
        try:
            return self._own["_evaluate"](trial, ignore_keys, skip_scheduler=True)
        finally:
            self._is_alone = False

    def evaluation_loop(self, loader: Any, *arguments: Any, **named: Any) -> EvalLoopOutput:
        if self._is_alone or not self._has_group():
            alone: EvalLoopOutput = self._own["evaluation_loop"](loader, *arguments, **named)
            return alone
        shard = shard_of(loader)

        def evaluate() -> tuple[Any, ...]:
            self._follow_group()
            self._rounds = Rounds(loader, shard) if shard is not None else None
            batches = loader if self._rounds is None else self._rounds
            try:
                return tuple(self._own["evaluation_loop"](batches, *arguments, **named))
            finally:
                self._rounds = None

        result = self._session.run(evaluate)
        self._follow_group()
        return EvalLoopOutput(*result)

    def get_eval_sampler(self, dataset: Any) -> Any:
        sampler = self._own["_get_eval_sampler"](dataset)
        if sampler is None:
            return None
        return BatchShard(sampler, self._trainer.args.eval_batch_size, self._evaluation_place)

    def _evaluation_place(self) -> tuple[int, int]:
        if self._rounds is None:
            return 0, 1
        return self._session.rank, self._session.world_size

    def _gather(self, tree: Any, *arguments: Any, **named: Any) -> Any:
        if self._rounds is None:
            return self._own_gather(tree, *arguments, **named)
        return self._rounds.gather(tree)

    # ---- in place of Trainer's: files

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        self._trainer.store_flos()
        self._session.run(self._save_once, model, trial)
        self._follow_group()

    def _save_once(self, model: Any, trial: Any) -> None:
        self._follow_group()
        trainer, state = self._trainer, self._trainer.state
        folder = f"checkpoint-{state.best_global_step}"
        best = os.path.join(trainer._get_output_dir(trial=trial), folder)
        if self._is_writer:
            self._own["_save_checkpoint"](model, trial)
        has_best = torch.tensor([state.best_model_checkpoint == best], device=self._session.device)
        dist.broadcast(has_best, 0)  # and nobody goes on before it is written
        if has_best:
            state.best_model_checkpoint = best

    def load_best_model(self) -> None:
        self._session.run(self._load_once)
        self._follow_group()

    def _load_once(self) -> None:
        self._follow_group()
        if self._is_writer:
            self._own["_load_best_model"]()
        for tensor in self._trainer.model.state_dict().values():
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, 0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)

    # ---- the steps, for the loader and the first callback

    def steps_of_epoch(self) -> Iterator[dict[str, Any]]:
        """Yield something for each step that is left of the present epoch."""
        while True:
            if self._next is not None:
                self._step, self._next = self._next, None
            elif not self._owed:
                step = next(self._steps, None)
                self._follow_group()
                if step is None:
                    return
                self._step = step
            yield {}
            if self._step.ends_epoch:
                return

    def training_began(self) -> None:
        """Trainer has set its sums to zero: put back what this worker has received."""
        self._name_report_directory()
        self._progress.load_state_dict(self._at_begin)
        self._reports = True

    def step_ended(self) -> None:
        """The optimizer and the scheduler have stepped: commit the step."""
        trainer, step = self._trainer, self._step
        self._place_state()
        if not self._owed:
            self._in_block = False
            step.__exit__(None, None, None)
            if not step.committed:
                raise _StepAgain
            self._place_state()
        self._owed = False
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        trainer.optimizer._is_overflow = False
        self._add_means()
        self._follow_group()

    # ---- inside

    def _divided(self, made: Any) -> DataLoader:
        """An elastic.DataLoader of what Trainer has made."""
        args = self._trainer.args
        batches = made.batch_sampler
        sampler = getattr(batches, "sampler", None)
        shuffles = None
        if type(batches) is torch_data.BatchSampler:
            if isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement:
                shuffles = True
            elif isinstance(sampler, torch_data.SequentialSampler):
                shuffles = False
        if not isinstance(made.dataset, torch_data.IterableDataset):  # refused by the loader
            refusals.require_sampler(sampler or batches, shuffles)
        options = {
            "num_workers": made.num_workers,
            "collate_fn": made.collate_fn,
            "pin_memory": made.pin_memory,
            "timeout": made.timeout,
            "worker_init_fn": made.worker_init_fn,
            "multiprocessing_context": made.multiprocessing_context,
            "prefetch_factor": made.prefetch_factor,
            "persistent_workers": made.persistent_workers,
            "in_order": made.in_order,
        }
        return DataLoader(
            made.dataset,
            self._trainer._train_batch_size,
            global_batch=self._global_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=bool(shuffles),
            drop_last=args.dataloader_drop_last,
            **options,
        )

    def _share(self, model: Any) -> None:
        """Distribute and track what Trainer has prepared; once, because the job keeps it."""
        trainer, session = self._trainer, self._session
        optimizer = trainer.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self._progress.scheduler = trainer.lr_scheduler
        if self._model is None:
            handler = trainer.accelerator.ddp_handler
            options = handler.to_kwargs() if handler is not None else {}
            self._model = session.distribute(model, **options)
            session.track(model=self._model, optimizer=optimizer, trainer=self._progress)
            session.track_local(trainer_history=self._history)
            if trainer.accelerator.scaler is not None:
                session.track(scaler=trainer.accelerator.scaler)
        elif self._model.module is not model:
            raise ConfigurationError(
                "trainer.train() was called again, and model_init has made another model: a job "
                "trains one; give Trainer(model=...) to train it further"
            )

    def _counted(self, batch: Any) -> dict[str, float]:
        """For each sample of the micro-batch: operations, and input tokens."""
        state, samples = self._trainer.state, len(self._step.positions)
        before = state.num_input_tokens_seen
        self._own["_track_num_input_tokens"](batch)
        tokens, state.num_input_tokens_seen = state.num_input_tokens_seen - before, before
        operations = self._own["floating_point_ops"](batch)
        return {"operations": operations / samples, "tokens": tokens / samples}

    def _backward(self, loss: torch.Tensor, **options: Any) -> None:
        step, weight, scaler = self._step, self._weight, self._trainer.accelerator.scaler
        step.mean(loss=loss.detach(), weight=weight)
        step.mean(**self._counts)
        step.backward(loss if scaler is None else scaler.scale(loss), weight=weight, **options)

    def _unwrap(self, model: Any, *arguments: Any, **named: Any) -> Any:
        inner = model.module if model is self._model else model
        return self._own_unwrap(inner, *arguments, **named)

    def _place_state(self) -> None:
        """Set where the job is. Trainer counts what this process has done."""
        assert self._data is not None
        state, step = self._trainer.state, self._step
        state.global_step = step.index + 1 - self._progress.began
        done = -(-step.samples.stop // self._global_batch)
        state.epoch = step.epoch + done / len(self._data)

    def _add_means(self) -> None:
        """Add to Trainer's sums what the group has in this step."""
        trainer, state, means = self._trainer, self._trainer.state, self._step.means
        loss, samples = means.loss, len(self._step.samples)
        if trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
            steps = state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / steps
        else:
            trainer._tr_loss += loss
        trainer.current_flos += means.operations * samples
        state.num_input_tokens_seen += round(means.tokens * samples)
        self._step.report(loss=loss)

    def _absorbs(self, error: BaseException) -> bool:
        """Whether the step's block is given up because the group is lost."""
        if not self._in_block:
            return isinstance(error, _StepAgain)
        self._in_block = False
        given_up: bool = self._step.__exit__(type(error), error, error.__traceback__)
        return given_up

    # ---- this worker's place

    def _has_group(self) -> bool:
        try:
            return self._session.world_size > 0
        except NotInGroup:
            return False

    def _follow_group(self) -> None:
        """Tell Trainer and Accelerate which worker writes. Before there is a group, it is that of
        the node's first slot."""
        session, trainer = self._session, self._trainer
        rank = session.rank if self._has_group() else session.local_rank
        writes = rank == 0 and not (self._has_group() and session.catching_up)
        if writes is self._is_writer:
            return
        self._is_writer = writes
        index = 0 if writes else max(1, rank)
        for shared in (trainer.args.distributed_state, trainer.accelerator.state):
            shared.process_index = shared.local_process_index = index
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = writes
        if writes and self._reports:
            self._begin_reports()

    def _begin_reports(self) -> None:
        """This worker is the one that reports from now on: begin those callbacks of the library
        that begin only where they report, and tell them what was logged before."""
        trainer = self._trainer
        handler, state = trainer.callback_handler, trainer.state
        named = {"model": handler.model, "processing_class": handler.processing_class}
        for each in handler.callbacks:
            module = type(each).__module__
            if not module.startswith("transformers.") or isinstance(each, ExportableState):
                continue
            each.on_train_begin(trainer.args, state, trainer.control, **named)
            if module.startswith("transformers.integrations."):
                for entry in state.log_history:
                    then = replace(state, global_step=entry["step"], epoch=entry.get("epoch", 0))
                    logs = {k: v for k, v in entry.items() if k != "step"}
                    each.on_log(trainer.args, then, trainer.control, logs=logs, **named)

    def _name_report_directory(self) -> None:
        """Let TensorBoard's callback write to one directory, whoever reports. By default its name
        has the time at which a worker begins to report."""
        trainer, group = self._trainer, self._session._training.group
        for each in trainer.callback_handler.callbacks:
            if getattr(each, "logging_dir", "") is None and group is not None:
                run = group.generation.incarnation
                each.logging_dir = os.path.join(trainer.args.output_dir, "runs", run)

    def _use_device(self) -> None:
        """Trainer takes the first device of the node."""
        trainer, args, device = self._trainer, self._trainer.args, self._session.device
        if args.device.type != device.type:
            raise ConfigurationError(
                f"TrainingArguments(use_cpu={args.use_cpu}) has the device {args.device}, and the "
                f"session {device}; set CUDA_VISIBLE_DEVICES='' where elastic starts to train on "
                "CPUs, and leave out use_cpu to train on GPUs"
            )
        if args.device != device:
            vars(args)["_setup_devices"] = device
            for shared in (args.distributed_state, trainer.accelerator.state):
                shared.device = device
            trainer.model.to(device)
        args._n_gpu = min(args.n_gpu, 1)
        trainer._train_batch_size = args.train_batch_size

    def _require_one_node(self) -> None:
        if self._asked_batch is None and self._session.world_size > self._workers:
            raise ConfigurationError(
                f"attach(trainer, session): the group has {self._session.world_size} workers on "
                f"several nodes of {self._workers}; say how many samples a step takes, with "
                "attach(trainer, session, global_batch=...)"
            )


class _Steps:
    """Stands for a train dataloader: it has one item for each step."""

    def __init__(self, attached: _Attached, data: DataLoader) -> None:
        self._attached, self._data = attached, data
        self.dataset, self.batch_size = data.dataset, data.policy.batch_size

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._attached.steps_of_epoch()


class _FirstCallback(TrainerCallback):
    """Comes before all other callbacks, which so find the state of the committed step."""

    def __init__(self, attached: _Attached) -> None:
        self._attached = attached

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Trainer's loop is about to begin."""
        self._attached.training_began()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Trainer has updated the model."""
        self._attached.step_ended()
