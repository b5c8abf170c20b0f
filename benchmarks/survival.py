"""Trains on digits with and without killed workers: same accuracy, every sample once.

    python -m benchmarks.survival --kills 20 --workers 2 3 4

Members are killed at random steps, one at a time, never the last one. The exit code is 0 only if
each run with kills succeeds, its ledger is good, and its accuracy is at least 97% and within one
point of the undisturbed run's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import save, show
from examples.ledger_check import audit
from tests.job_process import ROOT, JobProcess

SAMPLES = 1437
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended."""

    workers: int
    kills: int
    exit_code: int
    accuracy: float
    steps: int
    seconds: float
    recovery_s: tuple[float, ...]
    problems: tuple[str, ...]


class _Run(JobProcess):
    """`elastic run examples/digits.py` with its ledger in `directory`."""

    def __init__(self, directory: Path, workers: int, epochs: int) -> None:
        self.ledger = directory / "ledger.jsonl"
        options = ("--job", f"survival-{os.getpid()}", "--ledger", self.ledger)
        script = (ROOT / "examples" / "digits.py", "--epochs", str(epochs))
        super().__init__(*options, *script, nproc=workers, log_dir=directory / "logs")

    def newest(self) -> dict[str, Any]:
        """Return the ledger's record of the last committed step; {} if there is none."""
        with contextlib.suppress(OSError, ValueError):
            lines = self.ledger.read_bytes()[-2000:].split(b"\n")[1:-1]
            steps = [r for r in map(json.loads, lines) if "step" in r]
            return steps[-1] if steps else {}
        return {}

    def accuracy(self) -> float:
        match = re.search(r"test accuracy ([0-9.]+)", "\n".join(self.output))
        return float(match[1]) if match else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills in each disturbed run (20)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = [
        _measure(workers, kills, options.epochs, options.seed)
        for workers in options.workers
        for kills in (0, options.kills)
    ]
    show(
        "digits, undisturbed and with killed workers",
        ("workers", "kills", "exit", "accuracy", "steps", "s", "median recovery s", "problems"),
        [_row(outcome) for outcome in outcomes],
    )
    save("survival", {"outcomes": [vars(outcome) for outcome in outcomes]})
    pairs = zip(outcomes[::2], outcomes[1::2], strict=True)
    return 0 if all(_is_good(disturbed, calm) for calm, disturbed in pairs) else 1


def _measure(workers: int, kills: int, epochs: int, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as name, _Run(Path(name), workers, epochs) as run:
        began = time.monotonic()
        for number, target in enumerate(_targets(run, kills, random.Random(seed + workers))):
            print(f"{workers} workers: kill {number + 1} of {kills} at step {target}", flush=True)
        run.process.wait()
        exit_code = run.wait()  # after this, all of its output has been read
        audited = audit(run.ledger.read_text().splitlines(), samples=SAMPLES, epochs=epochs)
        return Outcome(
            workers=workers,
            kills=len([e for e in run.named("worker_failed") if e["kind"] == "signal"]),
            exit_code=exit_code,
            accuracy=run.accuracy(),
            steps=audited.steps,
            seconds=time.monotonic() - began,
            recovery_s=tuple(e["total_s"] for e in run.named("recovered")),
            problems=audited.problems,
        )


def _targets(run: _Run, kills: int, rng: random.Random) -> Iterator[int]:
    """Kill a random member when a group of two or more reaches a random step; yield that step."""
    for _ in range(kills):
        target = run.newest().get("step", 0) + rng.randint(5, 40)
        while run.process.poll() is None:
            newest = run.newest()
            if newest.get("step", 0) >= target and newest["world_size"] >= 2:
                break
            time.sleep(_POLL_S)
        else:
            return
        members = next(
            e["members"]
            for e in reversed(run.named("generation_formed"))
            if e["generation"] == newest["generation"]
        )
        run.kill_worker(rng.choice(members))
        yield target


def _row(outcome: Outcome) -> tuple[str, ...]:
    times = sorted(outcome.recovery_s)
    return (
        str(outcome.workers),
        str(outcome.kills),
        str(outcome.exit_code),
        f"{outcome.accuracy:.4f}",
        str(outcome.steps),
        f"{outcome.seconds:.1f}",
        f"{times[len(times) // 2]:.3f}" if times else "–",
        "; ".join(outcome.problems) or "none",
    )


def _is_good(disturbed: Outcome, undisturbed: Outcome) -> bool:
    return (
        disturbed.exit_code == 0
        and not disturbed.problems
        and disturbed.accuracy >= max(0.97, undisturbed.accuracy - 0.01)
    )


if __name__ == "__main__":
    sys.exit(main())
