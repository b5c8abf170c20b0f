"""Has system calls of a job fail, one in each of many jobs:

python -m tests.faults --points 2000 --seed 7
python -m tests.faults --point zygote:fork:2:EAGAIN
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.library import build
from tests.faults.points import Point, drawn
from tests.faults.running import attempt, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--points", type=int, default=100, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--point", action="append", default=[], help="ROLE:FUNCTION:NUMBER:ERROR")
    parser.add_argument("--role", help="only those of this role")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after that")
    parser.add_argument("--story", type=Path, help="folder that takes the story of each failure")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        truth = undisturbed(library)
        if not options.point:
            for (role, function), count in sorted(truth.counts.items()):
                print(f"     {role:8} {function:8} {count:6} calls")
        own = {k: n for k, n in truth.counts.items() if options.role in (None, k[0])}
        points = [Point.parse(text) for text in options.point] or itertools.islice(
            drawn(own, options.seed), options.points
        )
        tried: Counter[tuple[str, str]] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        missed = 0
        for point in points:
            if time.monotonic() - began > options.minutes * 60:
                break
            outcome = attempt(library, point, truth.weights)
            print(outcome.line, flush=True)
            if not outcome.fired and not outcome.wrong:
                missed += 1
                continue
            tried[point.role, point.function] += 1
            failed[point.role, point.function] += bool(outcome.wrong)
            for wrong in outcome.wrong:
                print(f"       {wrong}", flush=True)
            if outcome.wrong and options.story is not None:
                options.story.mkdir(parents=True, exist_ok=True)
                (options.story / f"{point}.txt").write_text(outcome.story)
            elif outcome.wrong and options.point:
                print(outcome.story, flush=True)
    for kind, count in sorted(tried.items()):
        print(f"{kind[0]:8} {kind[1]:8} {count - failed[kind]:4} of {count} passed")
    print(
        f"{tried.total() - failed.total()} of {tried.total()} points passed, {missed} were not "
        f"reached, in {time.monotonic() - began:.0f} s"
    )
    return 1 if failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())
