"""Names the arguments of a Trainer that cannot work in a job whose group changes, and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import transformers

from elastic.errors import ConfigurationError

_OWN_LAUNCHER = (
    "it divides the model among processes that must stay; leave it out, or start the script with "
    "`elastic torchrun` and without elastic.init(), which restarts all workers when one is lost"
)
_STEPS_IN_BACKWARD = (
    "it updates weights in the backward pass, before gradients are averaged; use another optimizer"
)
# Of TrainingArguments: the values that are fit, and why others are not and what to do.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "deepspeed": (lambda v: not v, _OWN_LAUNCHER),
    "fsdp": (lambda v: not v, _OWN_LAUNCHER),
    "parallelism_config": (lambda v: v is None, _OWN_LAUNCHER),
    "torch_compile": (
        lambda v: not v,
        "each group wraps the model in DDP again, which would compile it again; leave it out",
    ),
    "auto_find_batch_size": (
        lambda v: not v,
        "workers would find different sizes; give per_device_train_batch_size, which limits a "
        "micro-batch and leaves the step's batch as it is",
    ),
    "train_sampling_strategy": (
        lambda v: str(v) in ("random", "sequential"),
        "its order depends on the world size; use 'random' or 'sequential', and sort or pack the "
        "samples in the dataset",
    ),
    "push_to_hub": (
        lambda v: not v,
        "every worker would create the repository before it has a rank; push below train(), with "
        "trainer.model.push_to_hub(), where session.rank is 0",
    ),
    "save_on_each_node": (
        lambda v: not v,
        "one worker of the job writes; give an output_dir that all nodes share",
    ),
    "enable_jit_checkpoint": (
        lambda v: not v,
        "a signal lets the job save at a step boundary by itself, with `elastic run "
        "--checkpoint-dir`; leave it out",
    ),
    "eval_use_gather_object": (
        lambda v: not v,
        "it unpickles what other workers send; return tensors from the model",
    ),
    "optim": (lambda v: "lomo" not in str(getattr(v, "value", v)).lower(), _STEPS_IN_BACKWARD),
}


def require_fit(trainer: Any) -> None:
    """Raise ConfigurationError for a trainer that cannot train in changing groups."""
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigurationError(
            f"attach({type(trainer).__name__}, session): this is no transformers.Trainer; make one "
            "as usual, and give it to attach()"
        )
    args = trainer.args
    for name, (fits, why) in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if not fits(value):
            raise ConfigurationError(f"TrainingArguments({name}={_shown(value)}): {why}")
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            raise ConfigurationError(
                f"TrainingArguments(accelerator_config={{{name!r}: True}}): elastic divides the "
                "batches; leave it out"
            )
    if (getattr(config, "gradient_accumulation_kwargs", None) or {}).get("sync_each_batch"):
        raise ConfigurationError(
            "TrainingArguments(accelerator_config={'gradient_accumulation_kwargs': "
            "{'sync_each_batch': True}}): workers can have different numbers of micro-batches, so "
            "only the last one is averaged; leave it out"
        )
    if trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers:
        raise ConfigurationError(
            f"attach(): the {type(trainer.model).__name__} is spread over several devices; load it "
            "without device_map and distributed_config, so that each worker has all of it"
        )


def require_seams(trainer: Any, names: Iterable[str]) -> None:
    """Raise ConfigurationError if this version of transformers lacks a method to replace."""
    lacking = [name for name in names if not callable(getattr(trainer, name, None))]
    if lacking:
        raise ConfigurationError(
            f"transformers {transformers.__version__} does not fit: its Trainer has no "
            f"{', '.join(lacking)}; install the version that `pip install "
            "'elastic-ddp[transformers]'` chooses"
        )


def require_fit_run(resume_from_checkpoint: object, trial: object) -> None:
    """Raise ConfigurationError for arguments of train() that contradict elastic."""
    if resume_from_checkpoint:
        raise ConfigurationError(
            f"trainer.train(resume_from_checkpoint={resume_from_checkpoint!r}): elastic's own "
            "checkpoints decide where a job goes on, and hold more (the place in the data, each "
            "worker's generators): start the job with --checkpoint-dir, and leave it out. To begin "
            "a new job from a model that Trainer has saved, load it with from_pretrained()"
        )
    if trial is not None:
        raise ConfigurationError(
            "trainer.hyperparameter_search(): a job trains one model; start a job for each trial"
        )


def require_sampler(sampler: object, shuffles: bool | None) -> None:
    """Raise ConfigurationError for the sampler of a train dataloader in an order of its own."""
    if shuffles is None:
        raise ConfigurationError(
            f"get_train_dataloader(): its sampler is a {type(sampler).__name__}, whose samples "
            "cannot be divided again when the group changes; leave get_train_dataloader() and "
            "_get_train_sampler() as they are, with train_sampling_strategy='random' or "
            "'sequential', and let the dataset have the order that you want"
        )


def _shown(value: object) -> str:
    return f"{value!r:.60}"
