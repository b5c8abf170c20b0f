"""Tries what elastic.transformers refuses, and prints each refusal as a line of JSON."""

import json
import sys
import tempfile

import torch
import transformers
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import elastic
from elastic.transformers import attach

session = elastic.init()
transformers.utils.logging.set_verbosity_error()
DATA = [{"x": torch.ones(2) * i, "labels": torch.ones(1)} for i in range(8)]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


class OwnSampler(Trainer):
    def _get_train_sampler(self, *_):
        return WeightedRandomSampler([1.0] * 8, 8)


class StopsEpochs(TrainerCallback):
    def on_step_end(self, _args, _state, control, **_):
        control.should_epoch_stop = True


def trainer_of(kind=Trainer, data=DATA, callbacks=None, **arguments):
    arguments = {"use_cpu": True, "report_to": [], "save_strategy": "no", **arguments}
    args = TrainingArguments(tempfile.mkdtemp(dir=sys.argv[1]), disable_tqdm=True, **arguments)
    return kind(model=Net(), args=args, train_dataset=data, callbacks=callbacks)


def with_argument(name, value):
    """An argument that may need what is not installed here, or prepare more than a test can."""
    trainer = trainer_of()
    setattr(trainer.args, name, value)
    attach(trainer, session)


def attached(train=(), **options):
    trainer = trainer_of(**options)
    attach(trainer, session)
    trainer.train(*train)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(DATA)


class Older(Trainer):
    _run_epoch = None


CASES = {
    "no trainer": lambda: attach(Net(), session),
    "no session": lambda: attach(trainer_of(), None),
    "twice": lambda: [attach(t, session) for t in [trainer_of()] * 2],
    "no samples": lambda: attach(trainer_of(), session, global_batch=0),
    "another version": lambda: attach(trainer_of(Older), session),
    **{
        f"{name}={value!r}": lambda name=name, value=value: with_argument(name, value)
        for name, value in {
            "deepspeed": "zero3.json",
            "fsdp": "full_shard",
            "torch_compile": True,
            "auto_find_batch_size": True,
            "train_sampling_strategy": "group_by_length",
            "push_to_hub": True,
            "save_on_each_node": True,
            "enable_jit_checkpoint": True,
            "eval_use_gather_object": True,
            "optim": "adalomo",
        }.items()
    },
    "split batches": lambda: attached(accelerator_config={"split_batches": True}),
    "resume": lambda: attached(("checkpoint-12",)),
    "sampler": lambda: attached(kind=OwnSampler),
    "iterable": lambda: attached(data=Endless(), max_steps=3),
    "plain trainer": lambda: trainer_of().train(),
    "epoch stop": lambda: attached(callbacks=[StopsEpochs()], per_device_train_batch_size=2),
}

for case, attempt in CASES.items():
    try:
        attempt()
        told = "was not refused"
    except elastic.errors.ConfigurationError as error:
        told = str(error)
    print(json.dumps({"case": case, "told": told}), flush=True)
