"""Waits for conditions that notify nobody, by polling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "",
    deadline_s: float = 20.0,
    *,
    every_s: float = 0.01,
) -> T:
    """The condition's first true value; after the deadline, AssertionError with `what`."""
    ends_at = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > ends_at:
            raise AssertionError(f"after {deadline_s:g} s: {what() if callable(what) else what}")
        time.sleep(every_s)
    return value


async def until(condition: Callable[[], object]) -> None:
    """`eventually` on an event loop; the deadline is the test's time-out."""
    while not condition():
        await asyncio.sleep(0.01)
