"""Processes that do nothing but run histories, as fast as they can."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from typing import TypeVar

from tests.sim.thaw import thaw

T = TypeVar("T")
R = TypeVar("R")

_HISTORIES_A_COLLECTION = 50
_run = 0


def in_processes(
    count: int, job: Callable[[T], R], items: Iterable[T], *, chunk: int = 25
) -> Iterator[R]:
    """`job` of each item, in their order."""
    with get_context("spawn").Pool(count, hurry) as pool:
        yield from pool.imap(job, items, chunksize=chunk)


def hurry() -> None:
    """Histories leave cycles behind: collected by `swept`, not whenever Python thinks so."""
    thaw("elastic.core")
    gc.freeze()
    gc.disable()


def swept() -> None:
    """A history is over."""
    global _run
    _run += 1
    if _run % _HISTORIES_A_COLLECTION == 0:
        gc.collect()
