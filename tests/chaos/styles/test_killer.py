"""The killer spares the last worker that holds the state."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.chaos.styles.killer import Killer
from tests.job_process import JobProcess


class FakeJob:
    """Workers w0, w1... that only wait. The last one is a spare, the others are members."""

    def __init__(self, number: int) -> None:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        self.workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(number)]
        self.process = self.workers[-1]

    def members(self) -> list[str]:
        return [f"w{i}" for i in range(len(self.workers) - 1)]

    def pid_of(self, worker: str) -> int:
        return self.workers[int(worker[1:])].pid

    def named(self, name: str) -> list[dict[str, Any]]:
        assert name == "worker_started"
        return [{"worker": f"w{i}", "pid": p.pid} for i, p in enumerate(self.workers)]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()


@pytest.fixture
def job() -> Iterator[FakeJob]:
    job = FakeJob(4)
    yield job
    job.close()


@pytest.fixture
def killer(job: FakeJob, tmp_path: Path) -> Killer:
    return Killer(cast(JobProcess, job), tmp_path, seed=0, nproc=3)


def commit(killer: Killer, job: FakeJob, worker: str, step: int) -> None:
    path = killer.out / f"progress-{job.pid_of(worker)}"
    path.write_text(f"{step:10} {1:10}\n")


def targets(killer: Killer) -> dict[str, list[str]]:
    return {aim: killer._targets(aim) for aim in ("member", "rank 0", "newcomer", "spare")}


def test_any_worker_is_a_target_before_the_first_commit(killer: Killer) -> None:
    assert targets(killer) == {
        "member": ["w0", "w1", "w2"],
        "rank 0": ["w0"],
        "newcomer": ["w0", "w1", "w2"],
        "spare": ["w3"],
    }


def test_the_last_holder_of_the_state_is_no_target(killer: Killer, job: FakeJob) -> None:
    commit(killer, job, "w0", 7)
    found = targets(killer)
    assert found["member"] == ["w1", "w2"]
    assert found["rank 0"] == []


def test_a_worker_two_steps_behind_does_not_hold_the_state(killer: Killer, job: FakeJob) -> None:
    commit(killer, job, "w0", 7)
    commit(killer, job, "w1", 5)
    assert "w0" not in targets(killer)["member"]
    commit(killer, job, "w1", 6)
    assert "w0" in targets(killer)["member"]


def test_a_dead_worker_does_not_count_as_a_holder(killer: Killer, job: FakeJob) -> None:
    commit(killer, job, "w0", 7)
    commit(killer, job, "w1", 7)
    job.workers[1].kill()
    job.workers[1].wait()
    assert targets(killer)["member"] == ["w2"]
