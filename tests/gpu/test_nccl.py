"""NCCL on real GPUs: the same promises as in tests/chaos. Skipped where there is no device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.chaos import records
from tests.chaos.kills import ENVIRONMENT, kill_at_random_steps
from tests.job_process import JobProcess

SCRIPT = Path(__file__).parent / "scripts" / "gpu_trainer.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]


def test_one_gpu_trains_and_commits(tmp_path: Path) -> None:
    with JobProcess(
        SCRIPT, tmp_path, nproc=1, log_dir=tmp_path / "logs", environment=ENVIRONMENT
    ) as job:
        assert job.wait() == 0, job.story()
    assert records.newest_step(tmp_path) >= 10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA devices")
def test_a_killed_member_is_survived(tmp_path: Path) -> None:
    with JobProcess(
        SCRIPT,
        tmp_path,
        nproc=torch.cuda.device_count(),
        log_dir=tmp_path / "logs",
        environment=ENVIRONMENT,
    ) as job:
        kill_at_random_steps(job, tmp_path, seed=1, kills=2)
        assert job.wait() == 0, job.story()
    found = records.read(tmp_path)
    assert records.check_equal_weights(found) > 0
    records.check_nothing_lost(found, job.named("generation_formed"))
