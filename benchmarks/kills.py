"""Kills workers of jobs under elastic and torchrun, in turns, and measures what each kill costs."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.kill_figures import KillFigures, kill_figures
from benchmarks.report import command_line, spread
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import Mark, commits

_START_S = 90.0
_RECOVER_S = 120.0
_SETTLE_STEPS = 25

Start = Callable[[str, Path, argparse.Namespace], Job]


def parse_kill_options(description: str | None) -> argparse.Namespace:
    parser = command_line(description)
    parser.add_argument("--kills", type=int, default=10, help="kills on each side (10)")
    parser.add_argument(
        "--kills-per-job",
        type=int,
        default=2,
        help="kills of one job before the other side's turn (2)",
    )
    parser.add_argument("--workers", type=int, default=3, help="workers of the job (3)")
    parser.add_argument("--size", choices=SIZES, default="5m", help="size of the model (5m)")
    parser.add_argument("--tracked-mb", type=int, default=0, help="more state under elastic (0)")
    parser.add_argument("--held-mb", type=int, default=0, help="other memory of each worker (0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the victims and times (0)")
    return parser.parse_args()


def kill_in_turns(
    start: Start,
    options: argparse.Namespace,
    *,
    warm_s: float,
    finished: Callable[[Job], None] = lambda _: None,
) -> dict[str, list[KillFigures]]:
    """Return the figures of each kill for the sides "elastic" and "torchrun".

    start: starts a job of a side in a directory; warm_s: seconds of training before each kill, to
    which a random time is added; finished: called with each job before it is ended.
    """
    chance = random.Random(options.seed)
    figures: dict[str, list[KillFigures]] = {"elastic": [], "torchrun": []}
    while any(len(done) < options.kills for done in figures.values()):
        for side, done in figures.items():
            kills = min(options.kills_per_job, options.kills - len(done))
            with (
                tempfile.TemporaryDirectory() as scratch,
                start(side, Path(scratch), options) as job,
            ):
                for _ in range(kills):
                    done.append(_kill_one(job, chance, options.workers, warm_s))
                    _print_progress(side, len(done), options.kills, done[-1])
                finished(job)
    return figures


def kill_document(
    options: argparse.Namespace, figures: dict[str, list[KillFigures]]
) -> dict[str, Any]:
    """Return the results of `kill_in_turns` as a document for `report.save`."""
    ours, theirs = ([f.any_step_s for f in figures[side]] for side in ("elastic", "torchrun"))
    return {
        "options": vars(options),
        "torchrun_to_elastic": statistics.median(theirs) / statistics.median(ours),
        "any_step_s": {"elastic": spread(ours), "torchrun": spread(theirs)},
        "kills": {side: [asdict(f) for f in done] for side, done in figures.items()},
    }


def _kill_one(job: Job, chance: random.Random, workers: int, warm_s: float) -> KillFigures:
    """Kill a random worker at a random moment of steady training; wait for full recovery."""
    job.wait_until(settled(workers, 0.0), what="steady training", limit_s=_START_S)
    time.sleep(warm_s + chance.uniform(0, 2))
    victim = chance.choice(job.members())
    killed_at_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    job.wait_until(settled(workers, killed_at_s), what="recovery", limit_s=_RECOVER_S)
    return kill_figures(job.marks(), killed_at_s=killed_at_s, workers=workers)


def settled(workers: int, since_s: float) -> Callable[[Sequence[Mark]], bool]:
    """Return the condition that a group of all workers, formed after `since_s`, trains steadily."""

    def condition(marks: Sequence[Mark]) -> bool:
        old = max((m.generation for m in marks if m.at_s <= since_s), default=-1)
        own = [
            m
            for m in commits(marks)
            if m.generation > old and m.rank == 0 and m.world_size == workers
        ]
        return len(own) >= _SETTLE_STEPS

    return condition


def _print_progress(side: str, number: int, kills: int, figures: KillFigures) -> None:
    print(
        f"{side:9} kill {number:2} of {kills}: next step after {figures.any_step_s:.3f} s, "
        f"{figures.steps_again} steps again",
        flush=True,
    )
