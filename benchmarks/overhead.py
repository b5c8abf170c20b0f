"""Compares the step time of elastic with plain DDP, in the same process layout and in turns.

    python -m benchmarks.overhead                              # all sizes, about 10 minutes
    python -m benchmarks.overhead --sizes 5m --workers 2       # one of them
    python -m benchmarks.overhead --sizes 5m --styles ema gan sam moco
    python -m benchmarks.overhead --baseline unwatched --sizes 2ms 11m --workers 1 2

The baseline `unwatched` is elastic itself without what watches it: workers take no times, and
nothing is served, recorded or scraped. Against this baseline, elastic runs with `--http-address`,
`--curve` and `--tensorboard`; in each turn `/metrics` is scraped, and a client reads the page.

Four jobs are started, two of each side, and take turns: one trains for a second while the others
wait. A step's time is the time between two commits of rank 0. The two jobs of a side are identical,
so their ratio shows the noise of the comparison.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.jobs import Job, ddp_job, elastic_job, torchrun_job
from benchmarks.report import command_line, save, show
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.step_log import commits
from benchmarks.scripts.styles import STYLES
from benchmarks.scripts.turns import allow
from tests.etcd_cluster import free_ports

_START_S = 120.0
_WARM_UP_STEPS = 30
_SKIPPED = 2  # first steps of a turn: caches are cold
_LEAST_STEPS = 12
_PATIENT = ["--hang-timeout-s", "600"]
_RESAMPLES = 1000
_PLAIN = {"ddp": ddp_job, "torchrun": torchrun_job}
_UNWATCHED = "unwatched"
_SCRAPE_S = 10.0
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Otherwise glibc returns freed gradients to the kernel in some processes and not in others, on any
side, and those differ by 3%."""

T = TypeVar("T")
Turns = list[list[float]]  # step times in seconds, by turn


class Watch:
    """Watches a job, in the job's own turns only: the other side's turns must not pay for it."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self._address = f"127.0.0.1:{port}"
        self.scrapes = 0
        """Scrapes that were answered."""

    def options(self, directory: Path) -> list[str]:
        """Return the options that turn on everything that watches the job."""
        files = ["--curve", str(directory / "curve"), "--tensorboard", str(directory / "board")]
        return ["--http-address", self._address, *files]

    def look(self, seconds: float) -> None:
        """In the background, scrape the metrics once and read the page for `seconds`."""
        threading.Thread(target=self._look, args=(seconds,), daemon=True).start()

    def _look(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        where = f"http://{self._address}"
        with urllib.request.urlopen(f"{where}/metrics", timeout=_SCRAPE_S) as answer:
            self.scrapes += bool(answer.read())
        with urllib.request.urlopen(f"{where}/page/stream", timeout=_SCRAPE_S) as stream:
            while time.monotonic() < ends_at and stream.readline():
                pass  # a browser's own work does not count for the job


class Side:
    """One job that trains only when the benchmark lets it."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        size: str,
        style: str = "plain",
        one_by_one: bool,
        workers: int,
        watch: Watch | None = None,
    ) -> None:
        self.name = name
        self.watch = watch
        self.turns: Turns = []
        self._workers = workers
        self._allowed = 0
        self._usual_s = 0.0
        directory.mkdir()
        self._limit = directory / "turns"
        allow(self._limit, 0)
        arguments = ["--size", size, "--style", style, "--turns", str(self._limit)]
        arguments += ["--one-by-one"] if one_by_one else []
        if name in _PLAIN:
            self.job: Job = _PLAIN[name](directory, *arguments, workers=workers)
            return
        script = "unwatched_train.py" if name == _UNWATCHED else "elastic_train.py"
        options = _PATIENT if watch is None else [*_PATIENT, *watch.options(directory)]
        self.job = elastic_job(
            directory, *arguments, workers=workers, options=options, script=script
        )

    def train(self, steps: int) -> list[float]:
        """Let the job do `steps` more; return the times of all but the first few of them."""
        first, self._allowed = self._allowed, self._allowed + steps
        allow(self._limit, self._allowed)
        if self.watch is not None and self._usual_s:  # the job serves HTTP by then
            self.watch.look(self._usual_s * steps)
        last = self._allowed - 1
        time.sleep(0.9 * steps * self._usual_s)  # polling takes CPU time from the workers
        self.job.wait_until(
            lambda marks: sum(m.step == last for m in commits(marks[-20:])) == self._workers,
            what=f"step {last} on {self.name}",
            limit_s=_START_S,
        )
        own = [m for m in commits(self.job.marks()) if m.rank == 0 and m.step >= first + _SKIPPED]
        if own[0].generation != own[-1].generation:
            raise RuntimeError(f"{self.name} changed its group: {self.job.story()}")
        times_s = [later.at_s - earlier.at_s for earlier, later in pairwise(own)]
        self._usual_s = statistics.median(times_s)
        return times_s

    def close(self) -> None:
        self.job.close()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Step times of two jobs of each side, turn by turn."""

    size: str
    style: str
    workers: int
    load_1min: float
    elastic_s: tuple[Turns, Turns]
    baseline_s: tuple[Turns, Turns]

    @property
    def ratio(self) -> float:
        """Elastic's median over all steps to the baseline's."""
        return _median(self.elastic_s) / _median(self.baseline_s)

    @property
    def mean_ratio(self) -> float:
        """Elastic's mean to the baseline's; rare long steps count here, too."""
        return _mean(self.elastic_s) / _mean(self.baseline_s)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of `ratio`, by a bootstrap over rounds of turns."""
        draw = random.Random(0)
        rounds = range(len(self.elastic_s[0]))
        ratios = []
        for _ in range(_RESAMPLES):
            drawn = draw.choices(rounds, k=len(rounds))
            elastic, baseline = (
                _median([[job[r] for r in drawn] for job in jobs])
                for jobs in (self.elastic_s, self.baseline_s)
            )
            ratios.append(elastic / baseline)
        cuts = statistics.quantiles(ratios, n=40)
        return cuts[0], cuts[-1]

    @property
    def elastic_again(self) -> float:
        """The ratio of the medians of elastic's two jobs."""
        return _median(self.elastic_s[1:]) / _median(self.elastic_s[:1])

    @property
    def baseline_again(self) -> float:
        """The ratio of the medians of the baseline's two jobs."""
        return _median(self.baseline_s[1:]) / _median(self.baseline_s[:1])


def main() -> None:
    options = _parse()
    os.environ.update(_KEEP_MEMORY)
    done = []
    for workers in options.workers:
        for size, style in itertools.product(options.sizes, options.styles):
            done.append(_compare(size, style, workers, options))
            print(f"{size}, {style}, {workers} workers: {done[-1].ratio:.3f}", flush=True)
    _show(done, options.baseline)
    save("overhead", {"options": vars(options), "comparisons": [_document(c) for c in done]})


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--styles", nargs="+", choices=STYLES, default=["plain"], help="ways to train (plain)"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3])
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="load sample by sample on both sides, with torch's loader; else elastic takes the "
        "rows of a batch at once, which torch's loader does not",
    )
    parser.add_argument("--turns", type=int, default=20, help="turns of each of the four jobs (20)")
    parser.add_argument("--turn-s", type=float, default=1.0, help="length of a turn (1 s)")
    parser.add_argument(
        "--baseline",
        choices=[*_PLAIN, _UNWATCHED],
        default="ddp",
        help="ddp: in elastic's process layout; torchrun: in its own, which biases the ratio; "
        "unwatched: elastic without what watches it",
    )
    return parser.parse_args()


def _compare(size: str, style: str, workers: int, options: argparse.Namespace) -> Comparison:
    names = ["elastic", options.baseline, options.baseline, "elastic"]
    watches = options.baseline == _UNWATCHED
    with tempfile.TemporaryDirectory() as scratch:
        sides: list[Side] = []
        try:
            for number, name in enumerate(names):
                sides.append(
                    Side(
                        name,
                        Path(scratch) / str(number),
                        size=size,
                        style=style,
                        one_by_one=options.one_by_one,
                        workers=workers,
                        watch=Watch() if watches and name == "elastic" else None,
                    )
                )
            usual_s = statistics.median(_flat(side.train(_WARM_UP_STEPS) for side in sides))
            steps = max(_LEAST_STEPS, round(options.turn_s / usual_s))
            for turn in range(options.turns):
                for side in _order(sides, turn):
                    side.turns.append(side.train(steps))
            unseen = [w for s in sides if (w := s.watch) is not None and w.scrapes < options.turns]
            if unseen:
                raise RuntimeError(f"{unseen[0].scrapes} scrapes in {options.turns} turns")
        finally:
            for side in sides:
                side.close()
    return Comparison(
        size=size,
        style=style,
        workers=workers,
        load_1min=os.getloadavg()[0],
        elastic_s=(sides[0].turns, sides[3].turns),
        baseline_s=(sides[1].turns, sides[2].turns),
    )


def _order(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    """Return a turn's order: each job has each place in turn; drift affects both sides alike."""
    first, second, third, fourth = sides
    orders = (
        (first, second, third, fourth),
        (second, first, fourth, third),
        (fourth, third, second, first),
        (third, fourth, first, second),
    )
    return orders[turn % len(orders)]


def _show(done: Sequence[Comparison], baseline: str) -> None:
    columns = [
        "model",
        "style",
        "workers",
        "elastic ms",
        f"{baseline} ms",
        "ratio",
        "95%",
        "of means",
    ]
    columns += ["elastic again", f"{baseline} again", "steps", "load"]
    rows = []
    for c in done:
        least, most = c.interval
        rows.append(
            [
                c.size,
                c.style,
                str(c.workers),
                f"{_median(c.elastic_s) * 1000:.2f}",
                f"{_median(c.baseline_s) * 1000:.2f}",
                f"{c.ratio:.3f}",
                f"{least:.3f} to {most:.3f}",
                f"{c.mean_ratio:.3f}",
                f"{c.elastic_again:.3f}",
                f"{c.baseline_again:.3f}",
                str(len(_all(c.elastic_s))),
                f"{c.load_1min:.1f}",
            ]
        )
    show("Step time, no failures (medians)", columns, rows)
    print("again: the ratio of two jobs of one side, which would be 1 without noise")


def _document(c: Comparison) -> dict[str, Any]:
    return {
        "size": c.size,
        "style": c.style,
        "workers": c.workers,
        "load_1min": c.load_1min,
        "ratio": c.ratio,
        "interval_95": c.interval,
        "ratio_of_means": c.mean_ratio,
        "elastic_again": c.elastic_again,
        "baseline_again": c.baseline_again,
        "elastic_s": c.elastic_s,
        "baseline_s": c.baseline_s,
    }


def _median(jobs: Sequence[Turns]) -> float:
    return statistics.median(_all(jobs))


def _mean(jobs: Sequence[Turns]) -> float:
    return statistics.mean(_all(jobs))


def _all(jobs: Sequence[Turns]) -> list[float]:
    return _flat(_flat(jobs))


def _flat(parts: Iterable[Sequence[T]]) -> list[T]:
    return [value for part in parts for value in part]


if __name__ == "__main__":
    main()
