"""Waits for what notifies nobody, by asking again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "",
    deadline_s: float = 20.0,
    *,
    every_s: float = 0.01,
) -> None:
    """Until the condition holds; after the deadline, AssertionError with `what`."""
    ends_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(f"after {deadline_s:g} s: {what() if callable(what) else what}")
        time.sleep(every_s)


async def until(condition: Callable[[], object]) -> None:
    """The same on an event loop; the deadline is the test's."""
    while not condition():
        await asyncio.sleep(0.01)
