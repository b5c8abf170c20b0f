"""The Strategy with which Lightning's Trainer trains in a job whose group changes.

To its loops the Trainer has one device, and a batch is a step of the job: no method of Lightning's
reduces over devices, or replaces a sampler. What elastic needs of the loops it gets at the places
below, each of them on the objects of one Trainer. `_SEAMS` is the whole list.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core import rank_zero

from elastic.errors import NotInGroup
from elastic.lightning import loggers, refusals
from elastic.lightning.fit import Fit
from elastic.lightning.metrics import StepMetrics
from elastic.lightning.refusals import refuse
from elastic.lightning.results import GroupResults
from elastic.lightning.tracked import CallbacksState, Schedulers, TrainerState
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.session import Session

_SEAMS = {
    "fit_loop._data_source": "makes of the training loader one that begins a step of the job",
    "fit_loop.run": "ends the loop over steps with the Trainer's, and ends the fit of a worker "
    "that finds no step left",
    "fit_loop.on_run_start": "forms the group before the first hook, which may ask for the rank",
    "fit_loop.epoch_loop.advance": "is repeated for a step that does not count",
    "fit_loop.epoch_loop._results": "takes the group's values, once for each step",
    "_logger_connector.update_eval_epoch_metrics": "takes rank 0's results of an evaluation, so "
    "that all workers decide alike",
    "_data_connector.prepare_data": "is called by one worker of a node after the other: there is "
    "no group in which others could wait",
    "_signal_connector.register_signal_handlers": "does nothing: elastic stops jobs, at a step",
    "logger.log_metrics": "waits for the end of a step's block",
    "Metric.update, Metric.forward": "count a step once and over the group",
}
"""What is replaced on a Trainer, its loggers and its module's metrics, and why."""

_WRITERS: Any = rank_zero.rank_zero_only
"""Whose `rank` decides whether this process writes to loggers and prints Lightning's notices."""
_NO_RANK = 1 << 30
"""Before the group forms: nobody writes."""


class _Job:
    """What the fits of one session have in common: one model, and what is tracked."""

    def __init__(self, session: Session, module: LightningModule, options: dict[str, Any]) -> None:
        self.module = module
        self.model: DistributedModel = session.distribute(module, **options)
        self.metrics = StepMetrics(module)
        self.state = TrainerState(self.metrics)
        self.callbacks = CallbacksState()
        self.schedulers = Schedulers()
        self.rows = loggers.Rows()


_JOBS: weakref.WeakKeyDictionary[Session, _Job] = weakref.WeakKeyDictionary()


class ElasticStrategy(Strategy):
    """Trains with the workers of an elastic job: `Trainer(strategy=ElasticStrategy(session))`.

    session: what elastic.init() has returned. The training loader is an elastic.DataLoader with
    global_batch. Everything that this strategy cannot do right is refused with ConfigurationError
    as `fit` begins.
    options: those of session.distribute (find_unused_parameters, static_graph...).
    """

    strategy_name = "elastic"
    world_size = 1
    """To the loops: a batch is one of the whole job. session.world_size is the group's."""

    def __init__(self, session: Session, **options: Any) -> None:
        super().__init__()
        self.session = session
        self._options = options
        self._fit: Fit | None = None
        self._rank: int | None = None
        self._attached: weakref.ref[Any] | None = None
        self._begins = False
        """A fit has begun, and no rank 0 is known yet."""
        _WRITERS.rank = _NO_RANK
        warnings.filterwarnings(
            "ignore", message=r"It is recommended to use `self\.log\(.*sync_dist"
        )

    # ---- this worker's place

    @property
    def root_device(self) -> torch.device:
        """The session's device."""
        return self.session.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker is rank 0; before the group has formed, the first one of its node."""
        return (self.session.local_rank if self._rank is None else self._rank) == 0

    @property
    def global_rank(self) -> int:
        """This worker's rank, which may change with the group; 0 before the group has formed."""
        return self._rank or 0

    @property
    def local_rank(self) -> int:
        """This worker's slot on its node."""
        return self.session.local_rank

    # ---- setting up

    def setup_environment(self) -> None:
        """Prepare the device. Raises ConfigurationError for what cannot work."""
        trainer = self._trainer
        refusals.require_device(trainer, self.root_device)
        super().setup_environment()
        self._attach(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            module = self._module
            refusals.require_fit(trainer, module)
            job = _JOBS.get(self.session)
            if job is not None and job.module is not module:
                refuse(
                    f"fit() was called with another module ({type(module).__name__})",
                    "but a job trains one model, which workers that join receive; train the "
                    "other one in another job",
                )

    def setup(self, trainer: Trainer) -> None:
        """Set up the model and its optimizer, and track all that a worker needs that joins."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        job = self._job
        refusals.require_optimizers(self.optimizers)
        job.state.follow(trainer)
        job.callbacks.follow(trainer)
        job.schedulers.present = [config.scheduler for config in self.lr_scheduler_configs]
        tracked: dict[str, Any] = {
            "model": job.model,
            "optimizer": self.optimizers[0],
            "schedulers": job.schedulers,
            "trainer": job.state,
            "metrics": job.metrics,
        }
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            tracked["scaler"] = scaler
        known = self.session._training.state
        for name in tracked.keys() & known.tracked.keys():
            known.replace(name, tracked.pop(name))
        self.session.track(**tracked)
        self.session.track_local(callbacks=job.callbacks)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizer and schedulers."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" in str(error):
                refusals.refuse_several(str(error).splitlines()[0])
            raise

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._trainer.state.fn != TrainerFn.FITTING:
            return model
        if self.session not in _JOBS:
            _JOBS[self.session] = _Job(self.session, self._module, self._options)
        job = self._job
        trainer, results = self._trainer, self._trainer.fit_loop.epoch_loop._results
        assert isinstance(results, GroupResults)
        job.rows.attach(trainer)
        self._begins = True
        self._fit = Fit(
            self.session,
            trainer,
            state=job.state,
            results=results,
            metrics=job.metrics,
            rows=job.rows,
            follow_group=self._follow_group,
        )
        return job.model

    def model_to_device(self) -> None:
        """Move the model to the device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def teardown(self) -> None:
        """Leave model and optimizer on the device: the job saves them at its end."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- a step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's training_step through the distributed model."""
        module = self._module
        try:
            return super().training_step(*args, **kwargs)
        except Exception:
            vars(module).pop("forward", None)  # which the detour through the model leaves behind
            raise

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Compute gradients through the step, which weights the loss by this worker's share."""
        del optimizer, args
        if self._fit is None or not self._fit.in_block:
            refuse(
                "manual_backward() was called",
                "but elastic computes the gradients of the loss that training_step returns",
            )
        module = self._module
        scaled = self.precision_plugin.pre_backward(closure_loss, module)
        self._fit.backward(scaled, closure_loss, **kwargs)
        result: torch.Tensor = self.precision_plugin.post_backward(scaled, module)
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute and commit the step."""
        assert self._fit is not None
        step = super().optimizer_step
        return self._fit.optimizer_step(
            optimizer, closure, lambda done: step(optimizer, done, model, **kwargs)
        )

    # ---- evaluation: every worker evaluates the whole of it, without a collective

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself."""
        with self.precision_plugin.val_step_context():
            return self._module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself."""
        with self.precision_plugin.test_step_context():
            return self._module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module itself."""
        with self.precision_plugin.predict_step_context():
            return self._module.predict_step(*args, **kwargs)

    # ---- between workers, outside of steps

    def barrier(self, name: str | None = None) -> None:
        """Wait for nobody: Lightning's barriers stand where all workers have the same anyway."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's answer to a question of yes or no, as of a clock. Anything else that
        Lightning broadcasts, such as paths, is part of the tracked state and equal everywhere."""
        if not isinstance(obj, bool):
            return obj
        return self._decided([obj], lambda votes: votes[src])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return whether all workers, or any of them, have decided so."""
        return self._decided([bool(decision)], min if all else max)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value itself, which is the group's already."""
        del group, reduce_op
        self._refuse_in_step("strategy.reduce()")
        return tensor

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Return the tensor itself: outside of training every worker sees all samples."""
        del group, sync_grads
        self._refuse_in_step("all_gather()")
        return tensor

    # ---- Lightning's own checkpoints

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a file for an evaluation. Raises ConfigurationError for a fit."""
        if self._trainer.state.fn == TrainerFn.FITTING:
            refuse(
                f"fit(ckpt_path={str(checkpoint_path)!r})",
                "would resume from another place than elastic, whose checkpoints have the data's "
                "position and every worker's state: resume with --checkpoint-dir. To begin with "
                "the weights of that file, load them above fit: "
                "module.load_state_dict(torch.load(path)['state_dict'])",
            )
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Let rank 0 write a file while the others wait: if it is lost meanwhile, the next rank 0
        writes it."""
        if self._trainer.state.status == TrainerStatus.INTERRUPTED:
            return  # this worker alone ends

        def save() -> None:
            if not dist.is_initialized() or dist.get_rank() == 0:
                self.checkpoint_io.save_checkpoint(
                    checkpoint, filepath, storage_options=storage_options
                )
            if dist.is_initialized():
                dist.barrier()

        if self._has_group:
            self.session.run(save)
            self._follow_group()
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

    # ---- inside

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def _job(self) -> _Job:
        return _JOBS[self.session]

    @property
    def _has_group(self) -> bool:
        return self.session._training.part.loop >= 0

    def _attach(self, trainer: Any) -> None:
        """Replace what `_SEAMS` lists, once for each Trainer."""
        if self._attached is not None and self._attached() is trainer:
            return
        self._attached = weakref.ref(trainer)
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        source = _BatchesSource(
            fit._data_source, lambda loader: self._require_fit().batches(loader)
        )
        fit._data_source = source
        fit_run, run_start, advance = fit.run, fit.on_run_start, epoch.advance
        fit.run = lambda: self._require_fit().run(fit_run)

        def on_run_start() -> None:
            self._require_fit().form_group()
            run_start()

        fit.on_run_start = on_run_start
        epoch.advance = lambda fetcher: self._require_fit().advance(advance, fetcher)
        epoch._results = GroupResults(self.reduce, self.root_device)
        connector = trainer._logger_connector
        update = connector.update_eval_epoch_metrics
        connector.update_eval_epoch_metrics = functools.partial(self._share, trainer, update)
        trainer._data_connector.prepare_data = functools.partial(_prepare_data, trainer)
        trainer._signal_connector.register_signal_handlers = lambda: None

    def _require_fit(self) -> Fit:
        assert self._fit is not None, "fit has been set up"
        return self._fit

    def _follow_group(self) -> None:
        """Follow the group, which may be another one: who writes, and who shows progress.

        A worker that joins has a rank before it has the job's state, and writes nothing till then.
        """
        with contextlib.suppress(NotInGroup):
            before, self._rank = self._rank, self.session.rank
            has_state = not self.session._training.part.holds_back
            writes = self._rank == 0 and has_state
            did_write = _WRITERS.rank == 0
            _WRITERS.rank = 0 if writes else (self._rank or _NO_RANK)
            trainer = self._trainer
            if writes and (self._begins or not did_write):
                loggers.open_again(trainer)
                if trainer.enable_autolog_hparams:
                    _log_hyperparams(trainer)
                if not self._begins:
                    self._job.rows.write_again()
            self._begins = self._begins and not has_state
            if before != self._rank:
                _show_progress(trainer, self._rank == 0, takes_over=before is not None)

    def _decided(self, votes: list[bool], decide: Callable[[list[bool]], bool]) -> bool:
        """What the workers decide together, by the votes of all ranks."""
        if not self._has_group or self._trainer.state.status == TrainerStatus.INTERRUPTED:
            return decide(votes)
        self._refuse_in_step("a decision of all workers")

        def gather() -> list[bool]:
            mine = torch.tensor(votes, dtype=torch.uint8, device=self.root_device)
            gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, mine)
            return [bool(each.item()) for each in gathered]

        result = decide(self.session.run(gather))
        self._follow_group()
        return result

    def _share(self, trainer: Any, update: Callable[[], Any]) -> Any:
        """Take rank 0's results of an evaluation. Those of ranks with other buffers, or another
        device, may differ; and a worker that passes a fit that is done has no trained model."""
        results = trainer._results
        if trainer.sanity_checking or results is None or not self._has_group:
            return update()
        computed = [
            (metric, value)
            for _, metric in results.valid_items()
            if isinstance(value := results._get_cache(metric, on_step=False), torch.Tensor)
        ]
        if computed:
            flat = torch.cat([v.to(self.root_device).double().reshape(-1) for _, v in computed])

            def from_rank_0() -> torch.Tensor:
                shared = flat.clone()
                dist.broadcast(shared, src=0)
                return shared

            shared = self.session.run(from_rank_0)
            self._follow_group()
            sizes = [value.numel() for _, value in computed]
            parts = shared.to(self.root_device).split(sizes)  # type: ignore[no-untyped-call]
            for (metric, value), part in zip(computed, parts, strict=True):
                metric._computed = part.reshape(value.shape).to(value)
        return update()

    def _refuse_in_step(self, what: str) -> None:
        if self._fit is not None and self._fit.in_block:
            refuse(
                f"{what} was called in a training step,",
                "where workers have different numbers of samples, and may have different numbers "
                "of micro-batches; values of self.log and torchmetrics are the group's without it",
            )


class _BatchesSource(_DataLoaderSource):
    """Where the training loader comes from, which `wrap` replaces."""

    def __init__(self, source: _DataLoaderSource, wrap: Callable[[object], object]) -> None:
        super().__init__(source.instance, source.name)
        self._wrap = wrap

    def dataloader(self) -> Any:
        """Return the script's loader, wrapped."""
        return self._wrap(super().dataloader())


def _show_progress(trainer: Any, shows: bool, *, takes_over: bool) -> None:
    bar = trainer.progress_bar_callback
    if not isinstance(bar, ProgressBar):
        return
    if not shows:
        bar.disable()
        return
    bar.enable()
    if takes_over:
        bar.on_train_start(trainer, trainer.lightning_module)
        bar.on_train_epoch_start(trainer, trainer.lightning_module)


def _prepare_data(trainer: Any) -> None:
    """Call the hooks prepare_data, on one worker of this machine at a time: the first one prepares
    what the others then find."""
    module, data = trainer.lightning_module, trainer.datamodule
    calls = [
        (hook, owner)
        for hook, owner in (
            (call._call_lightning_datamodule_hook, data),
            (call._call_lightning_module_hook, module),
        )
        if owner is not None and is_overridden("prepare_data", owner)
    ]
    if not calls:
        return
    with _one_at_a_time():
        for hook, _ in calls:
            hook(trainer, "prepare_data")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    name = f"elastic-lightning-{os.getuid()}.lock"
    descriptor = os.open(Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
