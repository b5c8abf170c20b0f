"""Starts jobs, and kills their members at random steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos import records
from tests.job_process import JobProcess


def job_of(script: Path, out: Path, *options: str, nproc: int, **environment: str) -> JobProcess:
    """Start a job whose ledger, records and logs are in `out`."""
    return JobProcess(
        *("--ledger", out / "ledger.jsonl", script, out, *options),
        nproc=nproc,
        log_dir=out / "logs",
        environment=environment,
    )


def kill_at_random_steps(job: JobProcess, out: Path, seed: int, kills: int) -> None:
    """Kill one member at a time, each after a few more steps, never the last one left."""
    rng = random.Random(seed)
    for _ in range(kills):
        target = records.newest_step(out) + rng.randint(1, 25)

        def reached(target: int = target) -> bool:
            return records.newest_step(out) >= target and records.members_at_work(out) >= 2

        wait_until(job, reached, f"step {target} with two members")
        formed = len(job.named("generation_formed"))
        job.kill_worker(rng.choice(job.members()))
        job.wait_for(
            lambda formed=formed: len(job.named("generation_formed")) > formed, "a new generation"
        )


def wait_until(
    job: JobProcess, condition: Callable[[], bool], what: str, deadline_s: float = 60.0
) -> None:
    """Poll a condition on files, which notify nobody."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what}\n{job.story()}"
        assert job.process.poll() is None, f"ended before {what}\n{job.story()}"
        time.sleep(0.01)
