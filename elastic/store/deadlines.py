"""Waiting for something for so long and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def within(work: Awaitable[ResultT], seconds: float) -> ResultT:
    """The result; raises asyncio.TimeoutError when `work` has been cancelled and has ended.

    Before Python 3.12 `asyncio.wait_for` may swallow a cancellation that comes with the result.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, seconds))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not done:
        raise asyncio.TimeoutError
    return task.result()
