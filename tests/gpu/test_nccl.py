"""Jobs with NCCL on real GPUs; tests/chaos/test_nccl_manners.py tests the rest without a GPU.

Skipped where there is none; docs/GPU.md says what has run where. Workers share GPUs if there are
fewer than three (tests/shared_gpus.py).
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from tests.chaos import records
from tests.chaos.kills import kill_at_random_steps, wait_until
from tests.chaos.test_kills import TRAINER, check_outcome
from tests.job_process import WITH_COMPILER, JobProcess

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "gpu_trainer.py"
GPUS = torch.cuda.device_count()
WORKERS = max(GPUS, 3)
ABORT_S = 1.0  # limit for aborting a hanging collective on one node

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA device"),
]
STYLES = ["bf16-hook", "autocast", "scaler", "compiled", "plain"]


def job_of(
    out: Path, *options: str, nproc: int = WORKERS, script: Path = SCRIPT, own: bool = False
) -> JobProcess:
    """Start a job. own: each worker needs a GPU of its own."""
    return JobProcess(
        *("--ledger", out / "ledger.jsonl", "--checkpoint-dir", out / "checkpoints"),
        *(script, out, *([] if own or script != SCRIPT else ["--share"]), *options),
        nproc=nproc,
        log_dir=out / "logs",
        environment=WITH_COMPILER,
    )


@pytest.mark.parametrize("style", STYLES)
def test_one_gpu_trains_and_commits(tmp_path: Path, style: str) -> None:
    with job_of(tmp_path, "--style", style, nproc=1, own=True) as job:
        assert job.wait() == 0, job.story()
    assert records.newest_step(tmp_path) >= 10


def test_more_workers_than_gpus_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with job_of(tmp_path, nproc=GPUS + 1, own=True) as job:
        assert job.wait() == 78, job.story()
    messages = [e["message"] for e in job.named("worker_failed")]
    assert any(f"slot {GPUS} " in m and f"has {GPUS} " in m for m in messages), messages


@pytest.mark.parametrize("style", STYLES)
def test_kills_leave_equal_weights_and_lose_no_step(tmp_path: Path, style: str) -> None:
    """The newcomer for each killed worker receives a live state. Adam's step count stays on the
    host in all styles but `scaler`, which is fused."""
    with job_of(tmp_path, "--style", style) as job:
        kill_at_random_steps(job, tmp_path, seed=1, kills=3)
        assert job.wait(200) == 0, job.story()
    found = records.read(tmp_path)
    assert records.check_equal_weights(found) > 0
    records.check_nothing_lost(found, job.named("generation_formed"))
    places = {tuple(r["places"]) for rows in found.values() for r in rows if "places" in r}
    expected = ("cuda",) if style == "scaler" else ("cpu", "cuda")
    assert places == {expected}
    assert len(job.named("worker_failed")) == 3, job.story()


def test_kills_do_not_change_the_weights(tmp_path: Path) -> None:
    """The weights are those that one process computes on the host from the ledger's steps."""
    options = ["--epochs", "12", "--step-s", "0.02", "--accumulate", "3", "--loaders", "1"]
    with job_of(tmp_path, *options, script=TRAINER) as job:
        kill_at_random_steps(job, tmp_path, seed=3, kills=4)
        assert job.wait(200) == 0, job.story()
    check_outcome(job, tmp_path, 12)


def test_a_lost_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The second run's weights are those of one process that took all steps of the ledger."""
    options = ["--epochs", "8", "--step-s", "0.02"]
    with job_of(tmp_path, *options, script=TRAINER) as job:
        wait_until(job, lambda: records.newest_step(tmp_path) >= 20, "20 steps")
        job.process.send_signal(signal.SIGTERM)
        job.wait()
    first = records.newest_step(tmp_path)
    with job_of(tmp_path, *options, script=TRAINER) as job:
        assert job.wait(200) == 0, job.story()
    assert job.named("state_restored")[0]["committed"] == first + 1, job.story()
    check_outcome(job, tmp_path, 8)


def test_members_that_join_and_leave_as_planned_compute_nothing_twice(tmp_path: Path) -> None:
    """An NCCL group is ended by an abort, while peers may still be in its last collective."""
    with job_of(tmp_path, "--epochs", "20") as job:
        kill_at_random_steps(job, tmp_path, seed=5, kills=5)
        assert job.wait(250) == 0, job.story()
    planned = [e for e in job.named("generation_formed") if e["after_step"] is not None]
    assert planned
    records.check_nothing_lost(records.read(tmp_path), job.named("generation_formed"))


def test_a_hanging_collective_is_aborted_soon(tmp_path: Path) -> None:
    with job_of(tmp_path, "--epochs", "50") as job:
        wait_until(job, lambda: records.newest_step(tmp_path) >= 20, "20 steps")
        killed = time.monotonic()
        job.kill_worker(job.members()[-1])
        recovered = job.wait_for_event("recovered", reason="member_lost")
        print(f"recovered {time.monotonic() - killed:.3f} s after the kill: {recovered}")
        assert recovered["abort_s"] < ABORT_S, recovered


def test_members_that_are_lost_while_the_group_connects_cost_nobody_else(tmp_path: Path) -> None:
    """The others wait in C++ for its communicator, and there is none to abort yet."""
    with job_of(tmp_path, "--epochs", "50") as job:
        wait_until(job, lambda: records.newest_step(tmp_path) >= 10, "10 steps")
        for _ in range(4):
            wait_until(job, lambda: len(job.members()) >= WORKERS, "a full group")
            formed = len(job.named("generation_formed"))
            first, second = job.members()[-2:]
            job.kill_worker(first)
            job.wait_for(lambda n=formed: len(job.named("generation_formed")) > n, "a new group")
            if len(job.members()) > 1 and second in job.members():
                job.kill_worker(second)
            step = records.newest_step(tmp_path)
            wait_until(job, lambda s=step: records.newest_step(tmp_path) >= s + 5, "5 more steps")
        killed = {e["worker"] for e in job.named("worker_failed") if "SIGKILL" in e["message"]}
        assert {e["worker"] for e in job.named("worker_failed")} == killed, job.story()


def test_an_error_on_the_device_ends_the_job_with_its_message(tmp_path: Path) -> None:
    """After a failed assertion on the device every call in the process fails."""
    with job_of(tmp_path, script=SCRIPTS / "wrong_index.py") as job:
        assert job.wait(120) not in (0, None), job.story()
    (ended,) = job.named("job_ended")
    assert "device-side assert" in ended["message"], ended
