"""Measures the first steps of a job with much state, under elastic and under plain DDP, in turns.

    python -m benchmarks.first_steps                        # 3 jobs a side, 5 minutes
    python -m benchmarks.first_steps --size 5m --jobs 1     # a quick look

Times begin when all workers have built what they need to form a group. Memory is the most that a
worker had, touched before by a job that is not counted.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs import Job, ddp_job, elastic_job
from benchmarks.report import command_line, save, seconds, show
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import COMMIT, READY

_STEPS = 20
_LIMIT_S = 300.0
_SIDES: dict[str, Callable[..., Job]] = {"elastic": elastic_job, "DDP": ddp_job}
_ROWS = {"ready to the first step's end": 0, f"ready to the end of step {_STEPS}": _STEPS - 1}


def main() -> None:
    options = _parse()
    times: dict[str, list[list[float]]] = {side: [] for side in _SIDES}
    memory_mb: dict[str, list[float]] = {side: [] for side in _SIDES}
    for number in range(options.jobs + 1):
        for side, start in _SIDES.items():
            found, most_mb = _measure(start, options)
            print(f"{side}: {found[0]:.2f} s, {found[-1]:.2f} s, {most_mb:.0f} MB", flush=True)
            if number:
                times[side].append(found)
                memory_mb[side].append(most_mb)
    rows = []
    for name, step in _ROWS.items():
        ours, theirs = ([found[step] for found in times[side]] for side in _SIDES)
        rows.append([name, *seconds(ours), *seconds(theirs), _ratio(ours, theirs)])
    ours, theirs = memory_mb.values()
    cells = [f"{statistics.median(each):.0f}" for each in (ours, theirs)]
    rows.append(["most memory, MB", cells[0], "", "", cells[1], "", "", _ratio(ours, theirs)])
    columns = ["seconds", "elastic", "min", "max", "DDP", "min", "max", "ratio"]
    show("The first steps (medians)", columns, rows)
    save("first_steps", {"options": vars(options), "times_s": times, "memory_mb": memory_mb})


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.3gb")
    parser.add_argument("--unlike", action="store_true", help="workers build other weights each")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each side (3)")
    return parser.parse_args()


def _measure(start: Callable[..., Job], options: argparse.Namespace) -> tuple[list[float], float]:
    """Return when each of the first steps was complete on all workers, and the most MB of one."""
    arguments = ["--size", options.size, *(["--unlike"] if options.unlike else [])]
    with (
        tempfile.TemporaryDirectory() as scratch,
        start(Path(scratch), *arguments, workers=options.workers) as job,
    ):

        def ended_at(step: int) -> list[float]:
            return [m.at_s for m in job.marks() if m.what == COMMIT and m.step == step]

        job.wait_until(
            lambda _: len(ended_at(_STEPS - 1)) == options.workers,
            what=f"{_STEPS} steps",
            limit_s=_LIMIT_S,
        )
        members = {m.pid for m in job.marks() if m.what == COMMIT}
        most_mb = max(_most_kb(pid) for pid in members) / 1024
        ready_at = max(m.at_s for m in job.marks() if m.what == READY and m.pid in members)
        return [max(ended_at(step)) - ready_at for step in range(_STEPS)], most_mb


def _most_kb(pid: int) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found, "the worker lives"
    return int(found[1])


def _ratio(ours: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}"


if __name__ == "__main__":
    main()
