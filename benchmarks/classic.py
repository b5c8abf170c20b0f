"""Kills one worker of a script written for torchrun: under elastic and under torchrun, in turns.

    python -m benchmarks.classic                  # 10 kills a side, about 5 minutes
    python -m benchmarks.classic --kills 2        # a quick look

The same script, unmodified, on both sides: all workers restart from a checkpoint of every 20 steps.
Both are measured by marks that the script writes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.jobs import SCRIPTS, Job, marks_directory, torchrun_job
from benchmarks.kill_figures import KillFigures, kill_figures
from benchmarks.report import save, seconds, show, spread
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import Mark, commits

_START_S = 90.0
_RECOVER_S = 120.0
_SETTLE_STEPS = 25


def main() -> None:
    options = _parse()
    chance = random.Random(options.seed)
    figures: dict[str, list[KillFigures]] = {"elastic": [], "torchrun": []}
    while any(len(done) < options.kills for done in figures.values()):
        for side, done in figures.items():
            kills = min(options.kills_per_job, options.kills - len(done))
            with (
                tempfile.TemporaryDirectory() as scratch,
                _start(side, Path(scratch), options) as job,
            ):
                for _ in range(kills):
                    done.append(_kill_one(job, chance, options.workers))
                    print(f"{side:9} {len(done):2} of {options.kills}: {done[-1]}", flush=True)
    _show(figures)
    ours, theirs = ([f.any_step_s for f in figures[side]] for side in ("elastic", "torchrun"))
    document = {
        "options": vars(options),
        "torchrun_to_elastic": statistics.median(theirs) / statistics.median(ours),
        "any_step_s": {"elastic": spread(ours), "torchrun": spread(theirs)},
        "kills": {side: [asdict(f) for f in done] for side, done in figures.items()},
    }
    save("classic", document)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=10, help="kills on each side (10)")
    parser.add_argument("--kills-per-job", type=int, default=2, help="then the other side (2)")
    parser.add_argument("--workers", type=int, default=3, help="workers of the job (3)")
    parser.add_argument("--size", choices=SIZES, default="5m", help="of the model (5m)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (0)")
    return parser.parse_args()


def _start(side: str, scratch: Path, options: argparse.Namespace) -> Job:
    arguments = ["--size", options.size]
    arguments += ["--checkpoint", str(scratch / "checkpoint.pt"), "--checkpoint-every", "20"]
    if side == "torchrun":
        return torchrun_job(scratch, *arguments, workers=options.workers)
    command = [sys.executable, "-m", "elastic.cli", "run", "--output", "json"]
    command += ["--job", f"bench-{os.getpid()}-{scratch.name}"]
    command += ["--nproc-per-node", str(options.workers), "--log-dir", str(scratch / "logs")]
    script = [str(SCRIPTS / "torchrun_train.py"), "--log-dir", str(marks_directory(scratch))]
    return Job([*command, *script, *arguments], scratch, {})


def _kill_one(job: Job, chance: random.Random, workers: int) -> KillFigures:
    """Kill a random worker at a random moment of steady training; wait until all is well again."""
    job.wait_until(_settled(workers, 0.0), what="steady training", limit_s=_START_S)
    time.sleep(1.0 + chance.uniform(0, 2))
    marks = job.marks()
    newest = max(mark.generation for mark in marks)
    victim = chance.choice(sorted({m.pid for m in marks if m.generation == newest}))
    killed_at_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    job.wait_until(_settled(workers, killed_at_s), what="recovery", limit_s=_RECOVER_S)
    return kill_figures(job.marks(), killed_at_s=killed_at_s, workers=workers)


def _settled(workers: int, since_s: float) -> Callable[[Sequence[Mark]], bool]:
    """A group of all workers has trained for a while, and began after `since_s`."""

    def condition(marks: Sequence[Mark]) -> bool:
        old = max((m.generation for m in marks if m.at_s <= since_s), default=-1)
        own = [
            m
            for m in commits(marks)
            if m.generation > old and m.rank == 0 and m.world_size == workers
        ]
        return len(own) >= _SETTLE_STEPS

    return condition


_ROWS: dict[str, Callable[[KillFigures], float]] = {
    "kill to the first step after the restart": lambda f: f.any_step_s,
    "kill to the next step not done before": lambda f: f.new_step_s,
    "usual step": lambda f: f.usual_step_s,
    "steps computed again": lambda f: f.steps_again,
}


def _show(figures: dict[str, list[KillFigures]]) -> None:
    rows = []
    for name, figure in _ROWS.items():
        ours, theirs = ([figure(f) for f in figures[side]] for side in ("elastic", "torchrun"))
        ratio = statistics.median(theirs) / statistics.median(ours)
        rows.append([name, *seconds(ours), *seconds(theirs), f"{ratio:.1f}"])
    columns = ["seconds", "elastic", "min", "max", "torchrun", "min", "max", "ratio"]
    show("A worker of a script written for torchrun killed (medians)", columns, rows)


if __name__ == "__main__":
    main()
