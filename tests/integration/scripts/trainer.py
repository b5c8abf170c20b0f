"""Trains a tiny GPT-2 with Hugging Face's Trainer, in float64 and without dropout.

    trainer.py OUTPUT [OPTIONS]

OPTIONS is JSON: "arguments" for TrainingArguments, "plain" for a Trainer without elastic, "kills",
a list of [phase, step, rank], and others that are read below. Each kill happens once in a job.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import elastic
from elastic.transformers import attach

OUTPUT = Path(sys.argv[1])
OPTIONS = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
OUTPUT.mkdir(parents=True, exist_ok=True)
session = None if OPTIONS.get("plain") else elastic.init()
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def world_size():
    """0 before the group forms."""
    try:
        return session.world_size
    except elastic.errors.NotInGroup:
        return 0


def die(phase, step):
    """Kill this worker, if the next kill is to happen here: once the group is whole again."""
    kills = OPTIONS.get("kills", ())
    number = sum((OUTPUT / f"killed-{n}").exists() for n in range(len(kills)))
    if number == len(kills) or world_size() < OPTIONS.get("workers", 3):
        return
    when, at, rank = kills[number]
    if when == phase and step >= at and rank == session.rank:
        (OUTPUT / f"killed-{number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Sentences(Dataset):
    """Of 16 tokens, of which up to 8 do not count. A word that the model does not know goes with
    each, as in datasets with more columns than the model takes."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = (torch.arange(16) * (1 + index % 7) + index) % 50
        labels = tokens.clone()
        labels[: index % 9] = -100
        return {"input_ids": tokens, "labels": labels, "unknown": "a word"}


def token_loss(outputs, labels, num_items_in_batch=None):
    """As the model's own loss, which is in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def sums(given):
    return {"sum": float(given.predictions.sum()), "labels": float(given.label_ids.sum())}


class Killed(Trainer):
    def compute_loss(self, model, inputs, *args, **named):
        if model.training:
            die("step", self.state.global_step)
        return super().compute_loss(model, inputs, *args, **named)

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        die("save", self.state.global_step)


class Phases(TrainerCallback):
    """Kills, and writes down what each worker sees."""

    def on_train_begin(self, _args, state, _control, **_):
        self.note("begin", step=state.global_step)

    def on_pre_optimizer_step(self, _args, state, _control, **_):
        """The last rank lags behind: its part of the step's last reduction never comes, in a group
        that breaks after the others have committed the step."""
        if OPTIONS.get("lags_at") == state.global_step and session.rank == 2:
            while not (OUTPUT / "killed-0").exists():
                time.sleep(0.01)
            time.sleep(0.2)
            torch.distributed.all_reduce(torch.zeros(1))

    def on_optimizer_step(self, _args, state, _control, **_):
        die("optimizer", state.global_step)

    def on_step_begin(self, _args, state, _control, **_):
        if "lags_at" in OPTIONS:
            self.note("begins", step=state.global_step)
        if session is not None and session.world_size < OPTIONS.get("workers", 3):
            time.sleep(OPTIONS.get("pace_s", 0.0))

    def on_step_end(self, _args, state, _control, **_):
        die("committed", state.global_step)
        if state.is_world_process_zero:
            self.note("step", step=state.global_step)

    def on_prediction_step(self, _args, state, _control, **_):
        die("evaluation", state.global_step)

    def on_log(self, _args, state, _control, logs, **_):
        if state.is_world_process_zero:
            self.note("log", step=state.global_step, **logs)

    def on_save(self, _args, state, _control, **_):
        if state.is_world_process_zero:
            self.note("save", step=state.global_step)

    def note(self, what, **more):
        with (OUTPUT / "notes.jsonl").open("a") as file:
            file.write(
                json.dumps(
                    {"what": what, "pid": os.getpid(), "at": time.time(), **more}, default=str
                )
                + "\n"
            )


def model_of():
    torch.manual_seed(0)
    config = GPT2Config(
        **{"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **{"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"},
    )
    model = GPT2LMHeadModel(config).to(getattr(torch, OPTIONS.get("dtype", "float64")))
    if OPTIONS.get("lora"):
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
        model = model.to(torch.float64)
    return model


arguments = {
    "output_dir": str(OUTPUT),
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "num_train_epochs": 3,
    "learning_rate": 3e-3,
    "warmup_steps": 5,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "train_sampling_strategy": "sequential",
    "logging_steps": 4,
    "save_strategy": "no",
    **OPTIONS.get("arguments", {}),
}
callbacks = [Phases()]
if OPTIONS.get("patience"):
    callbacks.append(transformers.EarlyStoppingCallback(OPTIONS["patience"]))
trainer = Killed(
    model=model_of(),
    args=TrainingArguments(**arguments),
    train_dataset=Sentences(OPTIONS.get("samples", 100)),
    eval_dataset=Sentences(21),
    compute_loss_func=token_loss if OPTIONS.get("exact", True) else None,
    compute_metrics=sums if OPTIONS.get("metrics") else None,
    callbacks=callbacks,
)
computed_in = set()
next(m for n, m in trainer.model.named_modules() if n.endswith("c_fc")).register_forward_hook(
    lambda _module, _inputs, output: computed_in.add(str(output.dtype))
)
if session is not None:
    attach(trainer, session, global_batch=OPTIONS.get("global_batch", 12))
if OPTIONS.get("before"):
    trainer.evaluate()
result = trainer.train()
for _ in range(OPTIONS.get("again", 0)):
    result = trainer.train()
after = trainer.evaluate(metric_key_prefix="after") if OPTIONS.get("after") else {}
predicted = trainer.predict(Sentences(9)).predictions.sum() if OPTIONS.get("predict") else 0.0
trainer.save_model(str(OUTPUT / "final"))
rank = getattr(session, "rank", 0)
(OUTPUT / f"history-{rank}.json").write_text(json.dumps(trainer.state.log_history))
if trainer.is_world_process_zero():
    torch.save(trainer.model.state_dict(), OUTPUT / "weights.pt")
    told = {
        "steps": result.global_step,
        "loss": result.training_loss,
        "history": trainer.state.log_history,
        "best": [trainer.state.best_metric, trainer.state.best_model_checkpoint],
        "flos": trainer.state.total_flos,
        "tokens": trainer.state.num_input_tokens_seen,
        "after": after,
        "predicted": float(predicted),
        "computed_in": sorted(computed_in),
    }
    (OUTPUT / "result.json").write_text(json.dumps(told))
