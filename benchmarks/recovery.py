"""Kills one worker of a running job, again and again: elastic and torchrun, in turns.

    python -m benchmarks.recovery                  # 10 kills a side, about 6 minutes
    python -m benchmarks.recovery --kills 2        # a quick look

Both sides train the same model, and both are measured by marks that the training scripts write.
torchrun restarts all workers from a checkpoint of every 20 steps.
"""

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

from benchmarks.jobs import Job, elastic_job, torchrun_job
from benchmarks.kill_figures import KillFigures, kill_figures
from benchmarks.report import save, seconds, show, spread
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import Mark, commits

_START_S = 60.0
_RECOVER_S = 120.0
_SETTLE_STEPS = 25
_WARM_SPARE_S = 3.0  # a new spare imports torch meanwhile
_PHASES = ("detect_s", "persist_s", "notify_s", "abort_s", "join_s", "sync_s", "first_step_s")


def main() -> None:
    options = _parse()
    chance = random.Random(options.seed)
    figures: dict[str, list[KillFigures]] = {"elastic": [], "torchrun": []}
    recoveries: list[dict[str, Any]] = []
    while any(len(done) < options.kills for done in figures.values()):
        for side, done in figures.items():
            kills = min(options.kills_per_job, options.kills - len(done))
            with (
                tempfile.TemporaryDirectory() as scratch,
                _start(side, Path(scratch), options) as job,
            ):
                for _ in range(kills):
                    done.append(_kill_one(job, chance, options.workers))
                    _say(side, len(done), options.kills, done[-1])
                recoveries += job.events("recovered")
    _show(figures, recoveries)
    save("recovery", _document(options, figures, recoveries))


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
    if side == "elastic":
        return elastic_job(scratch, *arguments, workers=options.workers)
    arguments += ["--checkpoint", str(scratch / "checkpoint.pt"), "--checkpoint-every", "20"]
    return torchrun_job(scratch, *arguments, workers=options.workers)


def _kill_one(job: Job, chance: random.Random, workers: int) -> KillFigures:
    """Kill a random worker at a random moment of steady training; wait until all is well again."""
    job.wait_until(_settled(workers, 0.0), what="steady training", limit_s=_START_S)
    time.sleep(_WARM_SPARE_S + chance.uniform(0, 2))
    victim = chance.choice(_members(job.marks()))
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


def _members(marks: Sequence[Mark]) -> list[int]:
    newest = max(mark.generation for mark in marks)
    return sorted({mark.pid for mark in marks if mark.generation == newest})


def _say(side: str, number: int, kills: int, figures: KillFigures) -> None:
    print(
        f"{side:9} kill {number:2} of {kills}: next step after {figures.any_step_s:.3f} s, "
        f"{figures.steps_again} steps again",
        flush=True,
    )


_ROWS: dict[str, Callable[[KillFigures], float | None]] = {
    "kill to the next committed step": lambda f: f.any_step_s,
    "  less one usual step": lambda f: f.any_step_s - f.usual_step_s,
    "kill to the next step not done before": lambda f: f.new_step_s,
    "kill to a step of the whole group": lambda f: f.whole_s,
    "survivors' stall as the lost one returns": lambda f: f.rejoin_stall_s,
    "usual step": lambda f: f.usual_step_s,
    "steps computed again": lambda f: f.steps_again,
    "committed steps lost": lambda f: f.steps_lost,
}


def _show(figures: dict[str, list[KillFigures]], recoveries: list[dict[str, Any]]) -> None:
    rows = []
    for name, figure in _ROWS.items():
        ours, theirs = (_known(figure, figures[side]) for side in ("elastic", "torchrun"))
        ratio = _ratio(ours, theirs) if name.startswith("kill") else None
        cells = [*seconds(ours), *seconds(theirs), f"{ratio:.1f}" if ratio else ""]
        rows.append([name, *cells])
    columns = ["seconds", "elastic", "min", "max", "torchrun", "min", "max", "ratio"]
    show("One of the workers killed (medians)", columns, rows)
    phases = [
        [phase.removesuffix("_s").replace("_", " "), *seconds([r[phase] for r in recoveries])]
        for phase in (*_PHASES, "total_s")
    ]
    if len(recoveries) == len(figures["elastic"]):
        pairs = zip(figures["elastic"], recoveries, strict=True)
        unseen = [figure.any_step_s - record["total_s"] for figure, record in pairs]
        phases.append(["measured less total", *seconds(unseen)])
    columns = ["seconds", "median", "min", "max"]
    show("elastic, phase by phase, in its own figures", columns, phases)


def _known(figure: Callable[[KillFigures], float | None], done: list[KillFigures]) -> list[float]:
    return [value for value in map(figure, done) if value is not None]


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(theirs) / statistics.median(ours)


def _document(
    options: argparse.Namespace,
    figures: dict[str, list[KillFigures]],
    recoveries: list[dict[str, Any]],
) -> dict[str, Any]:
    sides = {side: [asdict(f) for f in done] for side, done in figures.items()}
    ours, theirs = ([f.any_step_s for f in figures[side]] for side in ("elastic", "torchrun"))
    return {
        "options": vars(options),
        "torchrun_to_elastic": _ratio(ours, theirs),
        "any_step_s": {"elastic": spread(ours), "torchrun": spread(theirs)},
        "kills": sides,
        "elastic_recoveries": recoveries,
    }


if __name__ == "__main__":
    main()
