"""Jobs with NCCL on real GPUs; tests/chaos/test_nccl_manners.py tests the rest without a GPU.

Skipped where there is none. docs/GPU.md says what has run where.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.chaos import records
from tests.chaos.kills import ENVIRONMENT, kill_at_random_steps, wait_until
from tests.job_process import JobProcess

SCRIPT = Path(__file__).parent / "scripts" / "gpu_trainer.py"
GPUS = torch.cuda.device_count()
ABORT_S = 1.0  # limit for aborting a hanging collective on one node

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(GPUS == 0, reason="needs an NVIDIA device"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA devices")
STYLES = ["bf16-hook", "autocast", "scaler", "plain"]


def job_of(out: Path, *options: str, nproc: int = max(GPUS, 1)) -> JobProcess:
    return JobProcess(
        SCRIPT, out, *options, nproc=nproc, log_dir=out / "logs", environment=ENVIRONMENT
    )


@pytest.mark.parametrize("style", STYLES)
def test_one_gpu_trains_and_commits(tmp_path: Path, style: str) -> None:
    with job_of(tmp_path, "--style", style, nproc=1) as job:
        assert job.wait() == 0, job.story()
    assert records.newest_step(tmp_path) >= 10


def test_more_workers_than_gpus_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with job_of(tmp_path, nproc=GPUS + 1) as job:
        assert job.wait() == 78, job.story()
    messages = [e["message"] for e in job.named("worker_failed")]
    assert any(f"slot {GPUS} " in m and f"has {GPUS} " in m for m in messages), messages


@two_gpus
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


@two_gpus
def test_members_that_join_and_leave_as_planned_compute_nothing_twice(tmp_path: Path) -> None:
    """An NCCL group is ended by an abort, while peers may still be in its last collective."""
    with job_of(tmp_path, "--epochs", "20") as job:
        kill_at_random_steps(job, tmp_path, seed=5, kills=5)
        assert job.wait(200) == 0, job.story()
    planned = [e for e in job.named("generation_formed") if e["after_step"] is not None]
    assert planned
    records.check_nothing_lost(records.read(tmp_path), job.named("generation_formed"))


@two_gpus
def test_a_hanging_collective_is_aborted_soon(tmp_path: Path) -> None:
    with job_of(tmp_path, "--epochs", "50") as job:
        wait_until(job, lambda: records.newest_step(tmp_path) >= 20, "20 steps")
        killed = time.monotonic()
        job.kill_worker(job.members()[-1])
        recovered = job.wait_for_event("recovered", reason="member_lost")
        print(f"recovered {time.monotonic() - killed:.3f} s after the kill: {recovered}")
        assert recovered["abort_s"] < ABORT_S, recovered
