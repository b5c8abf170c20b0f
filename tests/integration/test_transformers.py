"""Hugging Face's Trainer in a job: losses of workers, and what is refused.

The oracle is Trainer itself, in one process without elastic, with the same global batch.
"""

from __future__ import annotations

import importlib.util
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator

from tests.integration.running import CONFIGURATION, SCRIPTS, Place
from tests.job_process import ROOT, JobProcess

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
    pytest.mark.timeout(300),
]

WITH_TRANSFORMERS = {"PYTHONPATH": f"{ROOT / 'tests/with_transformers'}:{ROOT}"}
BATCH, TERMINATED = 12, 143
OFTEN = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}


def run_alone(place: Place, **options: Any) -> Path:
    """Train by Trainer itself in this process's place. Returns the directory with the result."""
    arguments = {"per_device_train_batch_size": BATCH, **options.pop("arguments", {})}
    output = place.files / "alone"
    given = json.dumps({"plain": True, **options, "arguments": arguments})
    done = place.python(SCRIPTS / "trainer.py", output, given, **WITH_TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    return output


def start(place: Place, *more: str | Path, nproc: int = 3, **options: Any) -> JobProcess:
    """Start a job of the same script, whose micro-batches have two samples."""
    given = json.dumps({"global_batch": BATCH, "pace_s": 0.1, "workers": nproc} | options)
    output = place.files / "job"
    script = ["trainer.py", output, given]
    return place.start(*script, nproc=nproc, options=more, **WITH_TRANSFORMERS)


def run_job(place: Place, kills: Sequence[tuple[str, int, int]], **options: Any) -> JobProcess:
    job = start(place, kills=kills, **options)
    assert job.wait() == 0, job.story()
    assert len(list(place.files.glob("job/killed-*"))) == len(kills), job.story()
    ended = [e for e in job.named("worker_failed") if e["kind"] != "left_out"]
    assert len(ended) == len(kills), job.story()
    return job


def notes(place: Place, what: str) -> list[dict[str, Any]]:
    lines = (place.files / "job/notes.jsonl").read_text().splitlines()
    return [note for line in lines if (note := json.loads(line))["what"] == what]


def require_same(job: Path, alone: Path, *, within: float = 1e-8) -> None:
    """The job has done what Trainer does: steps, curve, best metric, files, weights."""
    ours, theirs = (json.loads((at / "result.json").read_text()) for at in (job, alone))
    assert ours["steps"] == theirs["steps"]
    for name in ("flos", "tokens"):
        assert ours[name] == theirs[name], name
    assert ours["predicted"] == pytest.approx(theirs["predicted"], rel=1e-6)
    if theirs["best"][0] is not None:
        assert ours["best"][0] == pytest.approx(theirs["best"][0], rel=within)
    assert [at is None for at in ours["best"]] == [at is None for at in theirs["best"]]
    for histories in (ours, theirs):
        histories["history"] = [_without_durations(entry) for entry in histories["history"]]
    require_same_curve(ours["history"], theirs["history"])
    for history in job.glob("history-*.json"):  # also those of workers that do not write
        entries = [_without_durations(entry) for entry in json.loads(history.read_text())]
        require_same_curve(entries, theirs["history"])
    assert _names(job, "checkpoint-*") == _names(alone, "checkpoint-*")
    assert _names(job, "checkpoint-*/*") == _names(alone, "checkpoint-*/*")
    mine, right = (torch.load(at / "weights.pt") for at in (job, alone))
    assert mine.keys() == right.keys()
    for name, tensor in right.items():
        assert (mine[name] - tensor).norm() <= within * tensor.norm(), name


def require_same_curve(ours: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in right]
    for mine, entry in zip(ours, right, strict=True):
        assert mine == pytest.approx(entry, rel=1e-6), "sums of losses are in float32"


def _without_durations(entry: Mapping[str, Any]) -> dict[str, Any]:
    ends = ("_runtime", "_per_second", "_time")
    return {name: value for name, value in entry.items() if not name.endswith(ends)}


def _names(at: Path, pattern: str) -> set[str]:
    return {str(path.relative_to(at)) for path in at.glob(pattern)}


@pytest.mark.long
def test_a_trainer_whose_workers_are_killed_does_what_it_does_alone(place: Place) -> None:
    """Rank 0 is killed in an evaluation, another one in a step. Ranks have two micro-batches."""
    arguments = {**OFTEN, **BEST, "include_num_input_tokens_seen": "all"}
    options = {"arguments": arguments, "predict": True, "metrics": True}
    alone = run_alone(place, **options)
    run_job(place, [("step", 2, 1), ("evaluation", 6, 0)], **options)
    require_same(place.files / "job", alone)
    steps = [note["step"] for note in notes(place, "step")]
    assert steps == sorted(set(steps)), "one worker reports, each step once"


def test_what_cannot_work_is_refused_with_a_sentence(place: Place) -> None:
    """Each names the argument, its value or kind, and what to do."""
    done = place.python(SCRIPTS / "trainer_refusals.py", place.files, **WITH_TRANSFORMERS)
    told = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"case"'):
            refusal = json.loads(line)
            told[refusal["case"]] = refusal["told"]
    assert done.returncode == CONFIGURATION or done.returncode == 0, done.stderr
    expected = {
        "no trainer": "Net",
        "no session": "elastic.init()",
        "twice": "once",
        "no samples": "global_batch=0",
        "another version": "_run_epoch",
        "split batches": "split_batches",
        "resume": "'checkpoint-12'): elastic's own checkpoints",
        "sampler": "WeightedRandomSampler",
        "iterable": "IterableDataset",
        "plain trainer": "attach(trainer, session)",
        "epoch stop": "should_training_stop",
    }
    for case, text in told.items():
        assert expected.get(case, f"TrainingArguments({case}): ") in text, (case, text)
    assert expected.keys() <= told.keys(), done.stderr
    assert len(told) == len(expected) + 10


@pytest.mark.long
def test_ten_kills_change_nothing(place: Place) -> None:
    """Two in the last epoch, some of rank 0, one in an evaluation, one in a save."""
    arguments = {**OFTEN, **BEST, "num_train_epochs": 12, "save_total_limit": 2}
    options = {"arguments": arguments, "predict": True, "metrics": True, "after": True}
    alone = run_alone(place, **options)
    kills = [
        *(("step", 3, 1), ("step", 7, 0), ("committed", 9, 1), ("evaluation", 12, 1)),
        *(("step", 14, 2), ("save", 18, 0), ("optimizer", 20, 1), ("committed", 23, 0)),
        *(("step", 99, 1), ("optimizer", 101, 0)),
    ]
    run_job(place, kills, **options)
    require_same(place.files / "job", alone)
    steps = [note["step"] for note in notes(place, "step")]
    assert steps == sorted(set(steps))
    assert [n["step"] for n in notes(place, "save")] == list(range(6, 109, 6)), "one writer"


@pytest.mark.long
def test_a_job_goes_on_from_its_checkpoint_with_fewer_workers(place: Place) -> None:
    alone = run_alone(place, arguments={**OFTEN, **BEST})
    kept = place.files / "kept"
    job = start(place, "--checkpoint-dir", kept, pace_s=0.3, workers=4, arguments={**OFTEN, **BEST})
    noted = place.files / "job/notes.jsonl"
    job.wait_for(lambda: noted.exists() and len(notes(place, "step")) >= 8, "8 steps")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == TERMINATED, job.story()
    before = len(notes(place, "step"))
    assert before < 27
    again = start(place, "--checkpoint-dir", kept, nproc=2, arguments={**OFTEN, **BEST})
    assert again.wait() == 0, again.story()
    assert [note["step"] for note in notes(place, "step")] == list(range(1, 28))
    require_same(place.files / "job", alone)


@pytest.mark.long
def test_tensorboard_has_the_whole_curve_in_one_directory(place: Place) -> None:
    """What a killed rank 0 had not written yet, the next one writes."""
    arguments = {"report_to": ["tensorboard"], "disable_tqdm": False}
    run_job(place, [("step", 5, 0), ("step", 12, 0)], arguments=arguments)
    [directory] = (place.files / "job/runs").iterdir()
    events = event_accumulator.EventAccumulator(str(directory))
    events.Reload()
    steps = {scalar.step for scalar in events.Scalars("train/loss")}
    assert steps == set(range(4, 27, 4))


@pytest.mark.long
def test_bf16_is_bf16_and_batches_are_accumulated(place: Place) -> None:
    """The default of a step's batch is that of torchrun, here 2 x 3 x 3 workers."""
    arguments = {"bf16": True, "max_steps": 8, "gradient_checkpointing": True}
    options = {"exact": False, "dtype": "float32"}
    larger = {**arguments, "per_device_train_batch_size": 18}
    alone = run_alone(place, arguments=larger, **options)
    accumulated = {**arguments, "gradient_accumulation_steps": 3}
    run_job(place, [("step", 3, 1)], arguments=accumulated, global_batch=None, **options)
    ours, theirs = (
        json.loads((place.files / at / "result.json").read_text()) for at in ("job", alone)
    )
    assert ours["computed_in"] == theirs["computed_in"] == ["torch.bfloat16"]
    assert ours["steps"] == theirs["steps"] == 8
    assert ours["flos"] == theirs["flos"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_a_subclass_of_trainer_recovers_likewise(place: Place) -> None:
    alone, output = place.files / "alone", place.files / "job"
    script = SCRIPTS / "trainer_sft.py"
    done = place.python(script, alone, "plain", **WITH_TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    job = place.start(script.name, output, nproc=3, **WITH_TRANSFORMERS)
    assert job.wait() == 0, job.story()
    assert len(job.named("worker_failed")) == 1, job.story()
    ours, theirs = (json.loads((at / "result.json").read_text()) for at in (output, alone))
    for mine, right in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "epoch", "step"):
            assert mine[name] == pytest.approx(right[name], rel=1e-5), name
    weights, right = (torch.load(at / "weights.pt") for at in (output, alone))
    for name, tensor in right.items():
        assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.long
def test_a_worker_that_lags_behind_gets_the_step_from_the_others(place: Place) -> None:
    """The others have committed it when the group breaks: the worker logs what they have."""
    arguments = {"logging_steps": 1, **OFTEN}
    alone = run_alone(place, arguments=arguments)
    run_job(place, [("committed", 6, 1)], lags_at=5, arguments=arguments)
    require_same(place.files / "job", alone)
    begun: dict[int, list[int]] = {}
    for note in notes(place, "begins"):
        begun.setdefault(note["pid"], []).append(note["step"])
    laggards = [steps for steps in begun.values() if steps.count(6) == 2 and steps.count(5) == 1]
    assert laggards, "it has passed over the step that others have completed"


@pytest.mark.long
def test_training_twice_and_evaluating_before_and_between(place: Place) -> None:
    """A worker that joins in the second train() passes the first one."""
    options = {"again": 1, "before": True, "after": True, "arguments": {**OFTEN, **BEST}}
    alone = run_alone(place, **options)
    run_job(place, [("step", 6, 1), ("step", 20, 0), ("step", 10, 1)], **options)
    require_same(place.files / "job", alone)


@pytest.mark.long
def test_early_stopping_counts_the_same_after_losses(place: Place) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    arguments = {**often, **BEST, "learning_rate": 0.1}
    options = {"patience": 2, "after": True, "arguments": arguments}
    alone = run_alone(place, **options)
    run_job(place, [("evaluation", 3, 0)], pace_s=0.5, **options)
    require_same(place.files / "job", alone)


@pytest.mark.long
def test_lora_smoothed_labels_loader_processes_and_epochs(place: Place) -> None:
    """The losses of the library are in float32."""
    arguments = {
        "label_smoothing_factor": 0.1,
        "dataloader_num_workers": 1,
        **{f"{name}_strategy": "epoch" for name in ("eval", "save", "logging")},
        "eval_on_start": True,
        "num_train_epochs": 1.5,
        **BEST,
    }
    options = {"lora": True, "exact": False, "arguments": arguments}
    alone = run_alone(place, **options)
    run_job(place, [("step", 2, 0), ("evaluation", 9, 1)], **options)
    require_same(place.files / "job", alone, within=1e-5)
