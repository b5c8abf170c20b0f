"""Runs many histories: `python -m tests.sim --seeds 0:2000`, or one of them, aloud."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.sim.checkers import violations
from tests.sim.draw import plan
from tests.sim.mutants.catalogue import CATALOGUE
from tests.sim.mutants.trial import ENOUGH, try_mutants
from tests.sim.pool import judge_seeds
from tests.sim.stress import KINDS, QUEUED_KINDS
from tests.sim.world import World

_PROGRESS_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last+1, or one seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--stress",
        default="",
        choices=(*KINDS, *QUEUED_KINDS),
        help="run only histories of this stress",
    )
    parser.add_argument("--verbose", action="store_true", help="print each history")
    parser.add_argument(
        "--mutants", action="store_true", help="try each fault of tests/sim/mutants/catalogue.py"
    )
    parser.add_argument("--only", default="", help="mutants whose description contains this")
    parser.add_argument(
        "--histories",
        type=int,
        default=4000,
        help="search each planted fault in this many histories",
    )
    parser.add_argument(
        "--tries", type=int, default=400, help="run at most this many of those that reach its place"
    )
    parser.add_argument(
        "--with-unit-tests",
        action="store_true",
        help="run the unit tests on faults that the simulator misses",
    )
    arguments = parser.parse_args()
    if arguments.mutants:
        return _try_mutants(arguments)
    seeds = _seeds(arguments.seeds)
    began = time.perf_counter()
    if arguments.verbose:
        failed = [seed for seed in seeds if _tell(seed, arguments.stress)]
    else:
        failed = _run_all(seeds, arguments.jobs, arguments.stress)
    took_s = time.perf_counter() - began
    print(f"{len(seeds) - len(failed)} passed, {len(failed)} failed", end="")
    print(f" in {took_s:.1f} s, {len(seeds) / took_s:.0f} seeds/s")
    return 1 if failed else 0


def _try_mutants(arguments: argparse.Namespace) -> int:
    mutants = [m for m in CATALOGUE if arguments.only in f"{m.file}: {m.breaks}"]
    survived = []
    for verdict in try_mutants(
        mutants,
        histories=arguments.histories,
        tries=arguments.tries,
        jobs=arguments.jobs,
        unit_tests=arguments.with_unit_tests,
    ):
        print(verdict.line(), flush=True)
        if not verdict.found:
            survived.append(verdict)
    share = 1 - len(survived) / max(1, len(mutants))
    print(f"{len(mutants) - len(survived)} of {len(mutants)} planted faults found: {share:.0%}")
    return 0 if share >= ENOUGH else 1


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def _run_all(seeds: range, jobs: int, stress: str) -> list[int]:
    failed: list[int] = []
    again = f" --stress {stress!r}" if stress else ""
    told_at = time.monotonic()
    for done, (seed, found) in enumerate(judge_seeds(seeds, stress, jobs)):
        if time.monotonic() - told_at > _PROGRESS_S:
            told_at = time.monotonic()
            print(f"{done} of {len(seeds)}, {len(failed)} failed", file=sys.stderr, flush=True)
        if found:
            failed.append(seed)
            print(f"seed {seed}: {found[0]}")
            print(f"  python -m tests.sim --seeds {seed}{again} --verbose", flush=True)
    return failed


def _tell(seed: int, stress: str) -> bool:
    journal = World(plan(seed, stress)).run()
    found = violations(journal)
    print(plan(seed, stress), *journal.lines(), *found, journal.fingerprint(), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
