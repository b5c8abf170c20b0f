"""The ledger and curve of a job that is run several times have each step exactly once."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.ledger_check import Audit, audit
from tests.chaos.problem import lineage
from tests.integration.running import FAILED, Place, steps_of, tiny_disk, wait_for_step
from tests.job_process import JobProcess
from tests.waiting import eventually

SAMPLES = 48  # of steady.py


@pytest.mark.parametrize(
    ("end", "nproc"),
    [
        pytest.param(signal.SIGTERM, 3, id="stopped-as many workers", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, id="stopped-fewer workers", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 3, id="killed-as many workers", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 2, id="killed-fewer workers", marks=pytest.mark.long),
    ],
)
def test_a_run_resumed_from_a_checkpoint_has_all_its_steps_in_the_ledger(
    place: Place, tmp_path: Path, end: signal.Signals, nproc: int
) -> None:
    files = [tmp_path / "checkpoints", tmp_path / "ledger.jsonl"]
    first = start(place, *files, epochs=1000, nproc=3)
    change_group(first)
    first.process.send_signal(end)
    first.wait()
    eventually(lambda: not place.processes(), lambda: f"left: {place.processes()}")

    epochs = lineage(files[1])[-1]["epoch"] + 3
    second = start(place, *files, epochs=epochs, nproc=nproc)
    assert second.wait() == 0, second.story()
    restored = second.named("state_restored")[0]["committed"]
    assert restored > 0
    result = audited(files[1], epochs)
    assert not result.problems
    assert result.steps == second.named("job_finished")[0]["committed"]
    own = [step["step"] for step in lineage(files[1]) if step["run"] == newest_run(files[1])]
    assert own == list(range(restored, result.steps))
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == list(range(result.steps))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    shown = [(s.step, round(s.value, 5)) for s in board.Scalars("loss")]
    assert shown == [(line["step"], round(line["values"]["loss"], 5)) for line in curve]


@pytest.mark.long
def test_a_run_from_scratch_replaces_the_earlier_run_in_the_ledger(
    place: Place, tmp_path: Path
) -> None:
    files = [tmp_path / "checkpoints", tmp_path / "ledger.jsonl"]
    first = start(place, *files, epochs=1000, nproc=3)
    change_group(first)
    first.process.send_signal(signal.SIGTERM)
    first.wait()
    shutil.rmtree(files[0])

    second = start(place, *files, epochs=2, nproc=2)
    assert second.wait() == 0, second.story()
    result = audited(files[1], epochs=2)
    assert not result.problems
    assert {step["run"] for step in lineage(files[1])} == {newest_run(files[1])}
    assert result.resumed == 1


@pytest.mark.long
def test_a_full_disk_neither_stops_the_job_nor_loses_ledger_steps(
    place: Place, tmp_path: Path
) -> None:
    with tiny_disk(tmp_path / "disk", size_kib=256) as disk:
        ledger, filler = disk / "ledger.jsonl", disk / "filler"
        script = ["steady.py", "--epochs", 100_000, "--pace-s", 0.02, "--samples", SAMPLES]
        job = place.start(*script, options=["--ledger", ledger], nproc=2)
        wait_for_step(job, 5)
        fill(filler)
        job.wait_for_event("ledger_failed")
        wait_for_step(job, max(steps_of(job)) + 20)
        job.kill_worker(job.members()[0])  # rank 0, which reports for the group
        job.wait_for_event("recovered")
        wait_for_step(job, max(steps_of(job)) + 20)
        filler.unlink()
        job.wait_for_event("ledger_continued")
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        assert [e["reason"] for e in job.named("ledger_failed")] == ["No space left on device"]
        assert [e["kind"] for e in job.named("worker_failed")] == ["signal"]
        result = audit(ledger.read_text().splitlines(), samples=SAMPLES)
        assert not result.problems
        assert result.steps == job.named("job_ended")[0]["committed"]


@pytest.mark.long
def test_a_job_whose_script_fails_records_all_its_steps(place: Place, tmp_path: Path) -> None:
    ledger, curve = tmp_path / "ledger.jsonl", tmp_path / "curve.jsonl"
    options = ["--ledger", ledger, "--curve", curve]
    job = place.start("raises_in_step.py", "all", tmp_path / "none", options=options)
    assert job.wait() == FAILED
    assert [step["step"] for step in lineage(ledger)] == [0, 1, 2]
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]


def fill(path: Path) -> None:
    """Fill the disk of `path` to the last byte."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def start(place: Place, checkpoints: Path, ledger: Path, *, epochs: int, nproc: int) -> JobProcess:
    """Start a job that saves each step, often before it knows that the ledger has that step."""
    options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "1", "--ledger", ledger]
    options += [
        "--curve",
        ledger.with_name("curve.jsonl"),
        "--tensorboard",
        ledger.with_name("board"),
    ]
    script = ["steady.py", "--epochs", epochs, "--pace-s", 0.02, "--samples", SAMPLES]
    return place.start(*script, options=options, nproc=nproc)


def change_group(job: JobProcess) -> None:
    """Kill a worker, wait until it is replaced, and train on in the newest generation."""
    wait_for_step(job, 5)
    job.kill_worker(job.members()[-1])
    job.wait_for(lambda: len(job.named("generation_formed")) >= 3, "three generations")
    wait_for_step(job, max(steps_of(job)) + 25)


def audited(ledger: Path, epochs: int) -> Audit:
    return audit(ledger.read_text().splitlines(), samples=SAMPLES, epochs=epochs)


def newest_run(ledger: Path) -> str:
    run: str = lineage(ledger)[-1]["run"]
    return run
