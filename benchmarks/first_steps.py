"""Measures the first steps of a job with much state, under elastic and under plain DDP, in turns.

    python -m benchmarks.first_steps                        # 3 jobs a side, 5 minutes
    python -m benchmarks.first_steps --size 5m --jobs 1     # a quick look
    python -m benchmarks.first_steps --resume               # elastic's jobs begin with a checkpoint

Times begin when all workers have built what they need to form a group. Memory is the most that a
worker had, touched before by a job that is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs import Job, ddp_job, elastic_job
from benchmarks.report import command_line, save, seconds, show
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import COMMIT, READY

_LIMIT_S = 300.0
_SIDES: dict[str, Callable[..., Job]] = {"elastic": elastic_job, "DDP": ddp_job}


def main() -> None:
    options = _parse()
    times: dict[str, list[list[float]]] = {side: [] for side in _SIDES}
    memory_mb: dict[str, list[float]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory() as saved:
        if options.resume:
            _save(Path(saved), options)
        for number in range(options.jobs + 1):
            for side, start in _SIDES.items():
                found, most_mb = _measure(start, Path(saved), options)
                print(f"{side}: {found[0]:.2f} s, {found[-1]:.2f} s, {most_mb:.0f} MB", flush=True)
                if number:
                    times[side].append(found)
                    memory_mb[side].append(most_mb)
    rows = []
    names = {0: "ready to the first step's end", -1: f"ready to the end of step {options.steps}"}
    for step, name in names.items():
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
    parser.add_argument("--resume", action="store_true", help="elastic begins with a checkpoint")
    parser.add_argument("--tracked-mb", type=int, default=0, help="more state, which is frozen")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each side (3)")
    return parser.parse_args()


def _save(directory: Path, options: argparse.Namespace) -> None:
    """Save a checkpoint there, as the job does that is measured."""
    saves = ["--checkpoint-dir", str(directory), "--checkpoint-every", "3"]
    with (
        tempfile.TemporaryDirectory() as scratch,
        elastic_job(
            Path(scratch), *_arguments(options), workers=options.workers, options=saves
        ) as job,
    ):
        job.wait_until(
            lambda _: bool(job.events("checkpoint_committed")),
            what="checkpoint",
            limit_s=_LIMIT_S,
        )


def _measure(
    start: Callable[..., Job], saved: Path, options: argparse.Namespace
) -> tuple[list[float], float]:
    """Return when each of the first steps was complete on all workers, and the most MB of one."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as ending:
        more: dict[str, object] = {}
        if options.resume and start is elastic_job:
            # Links, since a job saves once more when it ends.
            own = shutil.copytree(saved, Path(scratch) / "checkpoints", copy_function=os.link)
            more = {"options": ["--checkpoint-dir", str(own), "--checkpoint-every", "0"]}
        job = ending.enter_context(
            start(Path(scratch), *_arguments(options), workers=options.workers, **more)
        )

        def ended_at(number: int) -> list[float]:
            commits = [m for m in job.marks() if m.what == COMMIT]
            first = min((m.step for m in commits), default=0)
            return [m.at_s for m in commits if m.step == first + number]

        job.wait_until(
            lambda _: len(ended_at(options.steps - 1)) == options.workers,
            what=f"{options.steps} steps",
            limit_s=_LIMIT_S,
        )
        members = {m.pid for m in job.marks() if m.what == COMMIT}
        most_mb = max(_most_kb(pid) for pid in members) / 1024
        ready_at = max(m.at_s for m in job.marks() if m.what == READY and m.pid in members)
        return [max(ended_at(step)) - ready_at for step in range(options.steps)], most_mb


def _arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--size", options.size, "--tracked-mb", str(options.tracked_mb)]
    return [*arguments, *(["--unlike"] if options.unlike else [])]


def _most_kb(pid: int) -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found, "the worker lives"
    return int(found[1])


def _ratio(ours: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}"


if __name__ == "__main__":
    main()
