"""Judges many histories in a pool of processes that are tuned for it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from tests.sim.history import check
from tests.sim.thaw import thaw

_HISTORIES_A_COLLECTION = 50


def judge_seeds(seeds: Sequence[int], stress: str, jobs: int) -> Iterator[tuple[int, list[str]]]:
    """Yield each seed with the violations in its history, in the order of `seeds`."""
    with get_context("fork").Pool(jobs, hurry) as pool:  # forking is safe: no threads here
        found = pool.imap(functools.partial(judge, stress=stress), seeds, chunksize=10)
        yield from zip(seeds, found, strict=True)


def hurry() -> None:
    """Make histories fast: thaw records, and turn automatic garbage collection off. The caller
    collects the cycles that histories leave behind from time to time."""
    thaw("elastic.core")
    gc.freeze()
    gc.disable()


def judge(seed: int, stress: str) -> list[str]:
    found = check(seed, stress=stress)
    if seed % _HISTORIES_A_COLLECTION == 0:
        gc.collect()
    return found
