"""Step time of elastic against plain DDP, in the same process layout and in turns.

    python -m benchmarks.overhead                              # all sizes, about 5 minutes
    python -m benchmarks.overhead --sizes 5m --workers 2       # one of them

Both jobs are started; then one trains for a second or two while all processes of the other are
stopped, and the other way round. A step's time is from one commit of rank 0 to its next.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, elastic_job, torchrun_job
from benchmarks.report import save, show, spread
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import commits
from benchmarks.scripts.turns import allow

_START_S = 90.0
_WARM_UP_STEPS = 30
_SKIPPED = 2  # first steps of a turn: caches are cold
_LEAST_STEPS = 12
_PATIENT = ["--hang-timeout-s", "600"]


class Side:
    """One job, of which the benchmark decides when it trains."""

    def __init__(self, name: str, scratch: Path, *, size: str, workers: int) -> None:
        self.name = name
        self._workers = workers
        self._allowed = 0
        directory = scratch / name
        directory.mkdir()
        self._turns = directory / "turns"
        allow(self._turns, 0)
        arguments = ["--size", size, "--turns", str(self._turns)]
        self.job: Job = (
            elastic_job(directory, *arguments, workers=workers, options=_PATIENT)
            if name == "elastic"
            else torchrun_job(directory, *arguments, workers=workers)
        )

    def train(self, steps: int) -> list[float]:
        """Let it do `steps` more; return the times of all but the first few of them."""
        self.job.thaw()
        first, self._allowed = self._allowed, self._allowed + steps
        allow(self._turns, self._allowed)
        last = self._allowed - 1
        self.job.wait_until(
            lambda marks: sum(m.step == last for m in commits(marks[-20:])) == self._workers,
            what=f"step {last} on {self.name}",
            limit_s=_START_S,
        )
        self.job.freeze()
        own = [m for m in commits(self.job.marks()) if m.rank == 0 and m.step >= first + _SKIPPED]
        if own[0].generation != own[-1].generation:
            raise RuntimeError(f"{self.name} changed its group: {self.job.story()}")
        return [later.at_s - earlier.at_s for earlier, later in pairwise(own)]

    def close(self) -> None:
        self.job.close()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Step times of both sides, turn by turn."""

    size: str
    workers: int
    elastic_s: Sequence[Sequence[float]]
    ddp_s: Sequence[Sequence[float]]

    @property
    def ratio(self) -> float:
        """Of the medians over all steps."""
        return _median(self.elastic_s) / _median(self.ddp_s)

    @property
    def mean_ratio(self) -> float:
        """Of the means, in which rare long steps count too."""
        return statistics.mean(_flat(self.elastic_s)) / statistics.mean(_flat(self.ddp_s))

    @property
    def turn_ratios(self) -> list[float]:
        """Of the medians of neighbouring turns."""
        pairs = zip(self.elastic_s, self.ddp_s, strict=True)
        return [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]


def main() -> None:
    options = _parse()
    done = []
    for workers in options.workers:
        for size in options.sizes:
            done.append(_compare(size, workers, options))
            print(f"{size}, {workers} workers: {done[-1].ratio:.3f}", flush=True)
    _show(done)
    save("overhead", {"options": vars(options), "comparisons": [_document(c) for c in done]})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--turns", type=int, default=10, help="of each side (10)")
    parser.add_argument("--turn-s", type=float, default=2.0, help="length of a turn (2 s)")
    return parser.parse_args()


def _compare(size: str, workers: int, options: argparse.Namespace) -> Comparison:
    times: dict[str, list[list[float]]] = {"elastic": [], "ddp": []}
    with tempfile.TemporaryDirectory() as scratch:
        sides: list[Side] = []
        try:
            sides += (Side(name, Path(scratch), size=size, workers=workers) for name in times)
            usual_s = statistics.median(_flat(side.train(_WARM_UP_STEPS) for side in sides))
            steps = max(_LEAST_STEPS, round(options.turn_s / usual_s))
            for turn in range(options.turns):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    times[side.name].append(side.train(steps))
        finally:
            for side in sides:
                side.close()
    return Comparison(size=size, workers=workers, elastic_s=times["elastic"], ddp_s=times["ddp"])


def _show(done: Sequence[Comparison]) -> None:
    columns = ["model", "workers", "elastic ms", "DDP ms", "ratio", "of means", "by turn", "steps"]
    rows = []
    for c in done:
        turns = spread(c.turn_ratios)
        rows.append(
            [
                c.size,
                str(c.workers),
                f"{_median(c.elastic_s) * 1000:.2f}",
                f"{_median(c.ddp_s) * 1000:.2f}",
                f"{c.ratio:.3f}",
                f"{c.mean_ratio:.3f}",
                f"{turns['median']:.3f} ({turns['min']:.3f} to {turns['max']:.3f})",
                str(sum(map(len, c.elastic_s))),
            ]
        )
    show("Step time, no failures (medians)", columns, rows)


def _document(c: Comparison) -> dict[str, Any]:
    return {
        "size": c.size,
        "workers": c.workers,
        "ratio": c.ratio,
        "ratio_of_means": c.mean_ratio,
        "ratio_by_turn": c.turn_ratios,
        "elastic_s": c.elastic_s,
        "ddp_s": c.ddp_s,
    }


def _median(turns: Sequence[Sequence[float]]) -> float:
    return statistics.median(_flat(turns))


def _flat(turns: Iterable[Sequence[float]]) -> list[float]:
    return [value for turn in turns for value in turn]


if __name__ == "__main__":
    main()
