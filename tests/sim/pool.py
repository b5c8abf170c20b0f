"""Judges histories in processes that do nothing else, as fast as they can."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from tests.sim.history import check
from tests.sim.thaw import thaw

_HISTORIES_A_COLLECTION = 50


def judged(seeds: Sequence[int], stress: str, jobs: int) -> Iterator[tuple[int, list[str]]]:
    """Each seed and the violations in its history, in the order of the seeds."""
    with get_context("fork").Pool(jobs, hurry) as pool:  # of this process, which has no threads
        found = pool.imap(functools.partial(judge, stress=stress), seeds, chunksize=10)
        yield from zip(seeds, found, strict=True)


def hurry() -> None:
    """Histories leave cycles behind: `judge` collects them, not Python whenever it thinks so."""
    thaw("elastic.core")
    gc.freeze()
    gc.disable()


def judge(seed: int, stress: str) -> list[str]:
    found = check(seed, stress=stress)
    if seed % _HISTORIES_A_COLLECTION == 0:
        gc.collect()
    return found
