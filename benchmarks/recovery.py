"""Kills workers of a running job, one at a time, under elastic and under torchrun, in turns.

    python -m benchmarks.recovery                  # 10 kills a side, about 6 minutes
    python -m benchmarks.recovery --kills 2        # a quick look

Both sides train the same model, and both are measured by marks that the training scripts write.
torchrun restarts all workers from the newest checkpoint, which is saved every 20 steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, elastic_job, torchrun_job
from benchmarks.kill_figures import KillFigures
from benchmarks.kills import kill_document, kill_in_turns, parse_kill_options
from benchmarks.report import save, seconds, show

_WARM_SPARE_S = 3.0  # a new spare starts up meanwhile
_PHASES = ("detect_s", "persist_s", "notify_s", "abort_s", "join_s", "sync_s", "first_step_s")


def main() -> None:
    options = parse_kill_options(__doc__)
    recoveries: list[dict[str, Any]] = []
    figures = kill_in_turns(
        _start,
        options,
        warm_s=_WARM_SPARE_S,
        finished=lambda job: recoveries.extend(job.events("recovered")),
    )
    _show(figures, recoveries)
    document = kill_document(options, figures)
    save("recovery", {**document, "elastic_recoveries": recoveries})


def _start(side: str, scratch: Path, options: argparse.Namespace) -> Job:
    arguments = ["--size", options.size, "--held-mb", str(options.held_mb)]
    if side == "elastic":
        arguments += ["--tracked-mb", str(options.tracked_mb)]
        return elastic_job(scratch, *arguments, workers=options.workers)
    arguments += ["--checkpoint", str(scratch / "checkpoint.pt"), "--checkpoint-every", "20"]
    return torchrun_job(scratch, *arguments, workers=options.workers)


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


if __name__ == "__main__":
    main()
