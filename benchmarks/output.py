"""Measures what a worker that floods its log costs, against one that writes nothing, in turns.

    python -m benchmarks.output                  # 1 minute of writing, 3 kills a side: 20 minutes
    python -m benchmarks.output --noise-s 10 --kills 1

The sides differ in what the worker writes. "none": nothing; "no-newline": 1 GiB a minute without an
end of line; "lines": 200,000 lines a second; "unread": as many lines, which `elastic run` copies,
with its own output, to a pipe that nobody reads. While the worker writes, the coordinator is asked
for the status every half second. Then the worker is killed, and the survivors' recovery measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.jobs import Job, elastic_job
from benchmarks.kill_figures import kill_figures
from benchmarks.kills import settled
from benchmarks.report import command_line, save, seconds, show
from benchmarks.scripts.noisy_train import NOISE
from elastic.cli.operator import Target

_WORKERS = 3
_START_S = 90.0
_RECOVER_S = 120.0
_ASK_EVERY_S = 0.5
_SIDES = ("none", "no-newline", "lines", "unread")
_MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one job."""

    recovery_s: float
    """From the kill to the next committed step, less a usual step."""
    usual_step_s: float
    answers_s: list[float]
    """How long each answer to `status` took."""
    agent_bytes: int
    """The highest resident memory of the process that runs agent and coordinator."""
    written_bytes: int
    """The size of the logs at the kill; a worker's is at most 128 MiB."""


def main() -> None:
    options = _options()
    figures: dict[str, list[Figures]] = {side: [] for side in _SIDES}
    for turn in range(options.kills):
        for side, done in figures.items():
            done.append(_measure(side, options.noise_s))
            print(
                f"{side:10} {turn + 1} of {options.kills}: recovered {done[-1].recovery_s:.3f} s "
                f"after the kill, less a step; slowest answer {max(done[-1].answers_s):.3f} s",
                flush=True,
            )
    _show(figures)
    document = {side: [asdict(f) for f in done] for side, done in figures.items()}
    save("output", {"options": vars(options), "sides": document})


def _options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        "--noise-s", type=float, default=60.0, help="seconds of writing before the kill (60)"
    )
    parser.add_argument("--kills", type=int, default=3, help="on each side, one a job (3)")
    return parser.parse_args()


def _measure(side: str, noise_s: float) -> Figures:
    with tempfile.TemporaryDirectory() as scratch, _job(side, Path(scratch)) as job:
        job.wait_until(settled(_WORKERS, 0.0), what="steady training", limit_s=_START_S)
        victim = min(job.members())
        named = Path(scratch) / f"{NOISE}.new"
        named.write_text(str(victim))
        named.rename(Path(scratch) / NOISE)
        answers, agent_bytes = _ask(job, noise_s)
        written = sum(p.stat().st_size for p in (Path(scratch) / "logs").rglob("*.log*"))
        killed_at_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        after = settled(_WORKERS, killed_at_s)
        job.wait_until(after, what="recovery", limit_s=_RECOVER_S)
        kill = kill_figures(job.marks(), killed_at_s=killed_at_s, workers=_WORKERS)
    return Figures(
        recovery_s=kill.any_step_s - kill.usual_step_s,
        usual_step_s=kill.usual_step_s,
        answers_s=answers,
        agent_bytes=agent_bytes,
        written_bytes=written,
    )


@contextmanager
def _job(side: str, scratch: Path) -> Iterator[Job]:
    noise = {"unread": "lines"}.get(side, side)
    options = ["--launch", "elastic", "--console", "all" if side == "unread" else "none"]
    arguments = ["--size", "small", "--noise", noise]
    with elastic_job(
        scratch,
        *arguments,
        workers=_WORKERS,
        options=options,
        script="noisy_train.py",
        unread=side == "unread",
    ) as job:
        yield job


def _ask(job: Job, for_s: float) -> tuple[list[float], int]:
    """Return (seconds that each answer took, highest resident bytes of the agent's process)."""

    async def ask() -> tuple[list[float], int]:
        answers, most = [], 0
        async with Target(job=job.name).client() as client:
            ends_at = time.monotonic() + for_s
            while time.monotonic() < ends_at:
                asked_at = time.monotonic()
                await client.status(30.0)
                answers.append(time.monotonic() - asked_at)
                most = max(most, _resident(job.pid))
                await asyncio.sleep(_ASK_EVERY_S)
        return answers, most

    return asyncio.run(ask())


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _show(figures: dict[str, list[Figures]]) -> None:
    rows = [
        [
            side,
            *seconds([f.recovery_s for f in done]),
            f"{statistics.median(f.usual_step_s for f in done):.3f}",
            f"{max(max(f.answers_s) for f in done):.3f}",
            f"{max(f.agent_bytes for f in done) / _MEGABYTE:.0f}",
            f"{_median([f.written_bytes for f in done]) / _MEGABYTE:.0f}",
        ]
        for side, done in figures.items()
    ]
    columns = ["side", "recovery", "min", "max", "step", "slowest answer", "agent MB", "log MB"]
    show("A worker that floods its log, then is killed (seconds)", columns, rows)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
