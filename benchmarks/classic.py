"""Kills one worker of a script written for torchrun, under elastic and under torchrun, in turns.

    python -m benchmarks.classic                  # 10 kills a side, about 5 minutes
    python -m benchmarks.classic --kills 2        # a quick look

Both sides run the same unmodified script. It saves a checkpoint every 20 steps, and all workers
restart from the newest one. Both sides are measured by marks that the script writes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs import Job, elastic_job, torchrun_job
from benchmarks.kill_figures import KillFigures
from benchmarks.kills import kill_document, kill_in_turns, parse_kill_options
from benchmarks.report import save, seconds, show


def main() -> None:
    options = parse_kill_options(__doc__)
    figures = kill_in_turns(_start, options, warm_s=1.0)
    _show(figures)
    save("classic", kill_document(options, figures))


def _start(side: str, scratch: Path, options: argparse.Namespace) -> Job:
    arguments = ["--size", options.size]
    arguments += ["--checkpoint", str(scratch / "checkpoint.pt"), "--checkpoint-every", "20"]
    if side == "torchrun":
        return torchrun_job(scratch, *arguments, workers=options.workers)
    return elastic_job(scratch, *arguments, workers=options.workers, script="torchrun_train.py")


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
