"""Make system calls of jobs fail, one after another, and report what is wrong afterwards.

Examples: `python -m tests.faults --points 2000 --seed 7`,
`python -m tests.faults --point zygote:fork:2:EAGAIN`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.etcd_cluster import etcd_cluster
from tests.faults.campaign import Campaign
from tests.faults.library import build
from tests.faults.long_running import LongOutcome
from tests.faults.points import Point, drawn
from tests.faults.running import Outcome, attempt, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--points", type=int, default=100, help="number of points to draw (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn points (0)")
    parser.add_argument("--point", action="append", default=[], help="ROLE:FUNCTION:NUMBER:ERROR")
    parser.add_argument(
        "--whole", action="store_true", help="run each point in a short job of its own"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no point after this time"
    )
    parser.add_argument("--story", type=Path, help="write the story of each failure to this folder")
    options = parser.parse_args()
    options.points = len(options.point) or options.points
    began = time.monotonic()
    tally = Tally(options.story, aloud=bool(options.point))
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        given = [Point.parse(text) for text in options.point]
        tries = _whole if options.whole else _long
        for outcome in tries(library, given, options.seed):
            tally.take(outcome)
            if tally.seen >= options.points or time.monotonic() - began > options.minutes * 60:
                break
    print(tally.summary(time.monotonic() - began))
    return 1 if tally.failed.total() else 0


def _whole(library: Path, given: list[Point], seed: int) -> Iterator[Outcome]:
    truth = undisturbed(library)
    for point in given or drawn(truth.counts, seed):
        yield attempt(library, point, truth.weights)


def _long(library: Path, given: list[Point], seed: int) -> Iterator[LongOutcome]:
    with etcd_cluster(size=1) as etcd:
        campaign = Campaign(library, etcd.endpoints(), seed)
        yield from campaign.several(given) if given else campaign.outcomes()


class Tally:
    """Prints the outcomes and counts them."""

    def __init__(self, stories: Path | None, *, aloud: bool) -> None:
        self._stories, self._aloud = stories, aloud
        self.seen = self.missed = 0
        self.tried: Counter[tuple[str, str]] = Counter()
        self.failed: Counter[tuple[str, str]] = Counter()

    def take(self, outcome: Outcome | LongOutcome) -> None:
        """Print and count an outcome. One whose point was not reached counts as missed."""
        print(outcome.line, flush=True)
        self.seen += not outcome.ends_job
        if not outcome.fired and not outcome.wrong:
            self.missed += 1
            return
        point = outcome.point
        kind = (point.role, point.function) if point is not None else ("none", "")
        self.tried[kind] += 1
        self.failed[kind] += bool(outcome.wrong)
        for wrong in outcome.wrong:
            print(f"       {wrong}", flush=True)
        if outcome.wrong and self._stories is not None:
            self._stories.mkdir(parents=True, exist_ok=True)
            (self._stories / f"{point}.txt").write_text(
                "\n".join([outcome.line, *outcome.wrong, outcome.story])
            )
        elif outcome.wrong and self._aloud:
            print(outcome.story, flush=True)

    def summary(self, took_s: float) -> str:
        lines = [
            f"{role:12} {function:8} {count - self.failed[role, function]:4} of {count} passed"
            for (role, function), count in sorted(self.tried.items())
        ]
        passed = self.tried.total() - self.failed.total()
        lines.append(
            f"{passed} of {self.tried.total()} points passed, {self.missed} were not reached, in "
            f"{took_s:.0f} s"
        )
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
