"""Refuses what Lightning's Trainer cannot do in a job whose group changes, with what to write."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from elastic.core.data_order import FixedGlobalBatch
from elastic.errors import ConfigurationError
from elastic.worker.data_loader import DataLoader

_OWN_LOADER = "elastic.DataLoader(dataset, batch_size=..., global_batch=...)"
_OWN_AVERAGE = (
    "keeps an average of the weights that a worker that joins would not have; keep "
    "torch.optim.swa_utils.AveragedModel as an attribute of the LightningModule, made in "
    "__init__, and update it in on_train_batch_end"
)
_TRIES = "trains by itself before the job does; find the value in a run without elastic"
_CALLBACKS = {
    "StochasticWeightAveraging": _OWN_AVERAGE,
    "WeightAveraging": _OWN_AVERAGE,
    "GradientAccumulationScheduler": (
        f"accumulates over steps; the loader accumulates: {_OWN_LOADER}"
    ),
    "BatchSizeFinder": _TRIES,
    "LearningRateFinder": _TRIES,
    "OnExceptionCheckpoint": (
        "resumes from its own file, but elastic resumes from its checkpoints: leave it out, and "
        "start the job with --checkpoint-dir"
    ),
}


def refuse(argument: str, why: str) -> NoReturn:
    """Raise ConfigurationError: `argument` names what was given, with its value."""
    raise ConfigurationError(f"ElasticStrategy: {argument} {why}")


def require_device(trainer: Any, device: torch.device) -> None:
    """Raise ConfigurationError if the Trainer has chosen another kind of device."""
    kind = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda"}
    name = type(trainer.accelerator).__name__
    if kind.get(name) != device.type:
        wanted = "cpu" if device.type == "cpu" else "gpu"
        refuse(
            f"the Trainer's accelerator is {name}",
            f"but this worker's device is {device}; write Trainer(accelerator={wanted!r}, ...)",
        )


def require_fit(trainer: Any, module: LightningModule) -> None:
    """Raise ConfigurationError, as `fit` begins, for what would train wrong or end at a loss."""
    if not module.automatic_optimization:
        refuse(
            f"{type(module).__name__}.automatic_optimization=False",
            "steps optimizers where elastic cannot weight, average and undo them; return the loss "
            "from training_step, or write the loop yourself: for step in session.steps(...)",
        )
    if trainer.accumulate_grad_batches != 1:
        refuse(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})",
            "accumulates over steps of the job; leave it out and give the loader the batch of a "
            f"whole step as global_batch: {_OWN_LOADER} accumulates as the group needs it",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        refuse(
            "Trainer(reload_dataloaders_every_n_epochs="
            f"{trainer.reload_dataloaders_every_n_epochs})",
            "replaces the loader, whose position is part of the job's state; leave it out",
        )
    if trainer._val_check_time_interval is not None:
        refuse(
            f"Trainer(val_check_interval={trainer._val_check_time_interval} s)",
            "goes by each worker's own clock; give a number of batches or a fraction",
        )
    if trainer._accelerator_connector._layer_sync is not None:
        refuse(
            "Trainer(sync_batchnorm=True)",
            "wraps the model itself; leave it out and, on GPUs, write "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module) before fit",
        )
    if is_overridden("backward", module):
        refuse(
            f"{type(module).__name__}.backward()",
            "is never called, because elastic weights each loss by the worker's share; change the "
            "loss in training_step instead",
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        refuse(
            f"{type(module).__name__}.training_step(dataloader_iter)",
            "takes several batches in a step; take the batch: training_step(self, batch, ...)",
        )
    for callback in trainer.callbacks:
        _require_callback(callback)


def _require_callback(callback: Any) -> None:
    for kind in type(callback).__mro__:
        why = _CALLBACKS.get(kind.__name__)
        if why is not None and getattr(lightning_callbacks, kind.__name__, None) is kind:
            refuse(f"the callback {type(callback).__name__}", why)


def require_loader(loader: object) -> DataLoader:
    """Return the training loader. Raise ConfigurationError if it is not one of elastic's, or has
    steps whose number depends on the group."""
    if not isinstance(loader, DataLoader):
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        size = getattr(loader, "batch_size", None)
        was = f" of batch_size={size}" if isinstance(size, int) else ""
        refuse(
            f"the training loader is a {kind}{was}, which",
            "cannot divide its samples again when the group changes, nor count each once; write "
            f"{_OWN_LOADER}, with global_batch for the samples of a whole step (under DDP: "
            "batch_size x devices). Loaders for validation, test and prediction stay as they are",
        )
    if not isinstance(loader.policy, FixedGlobalBatch):
        refuse(
            f"elastic.DataLoader(batch_size={loader.policy.batch_size}) without global_batch",
            "has more or fewer steps in an epoch as the group changes, and the Trainer plans by "
            "their number; add global_batch=..., the samples of a whole step",
        )
    return loader


def require_optimizers(optimizers: list[Any]) -> None:
    """Raise ConfigurationError unless there is one optimizer, that steps once for each closure."""
    kinds = [type(each).__name__ for each in optimizers]
    if kinds == ["_MockOptimizer"]:
        refuse("configure_optimizers() returned None", "so nothing is trained; return an optimizer")
    if len(optimizers) != 1:
        refuse_several(", ".join(kinds))
    if isinstance(optimizers[0], torch.optim.LBFGS):
        refuse(
            "configure_optimizers() returned LBFGS, which",
            "computes the loss several times in a step; use an optimizer that needs it once",
        )


def refuse_several(kinds: str) -> NoReturn:
    """Raise ConfigurationError for several optimizers."""
    refuse(
        f"configure_optimizers() returned several optimizers ({kinds})",
        "but automatic optimization steps one; give it all parameters in groups, or write the loop "
        "yourself: for step in session.steps(...)",
    )
