"""Limits the time of an `async with timeout(seconds):` block.

`asyncio.wait_for` will not do. Before Python 3.12, if the work ends at the moment when the task is
cancelled, it returns and loses the cancellation. A caller that cancels a task and waits for its end
would then wait forever. The package async_timeout loses one at the moment when the time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["timeout"]


@contextlib.asynccontextmanager
async def timeout_of_python_3_10(delay_s: float | None) -> AsyncIterator[None]:
    """asyncio.timeout for Python 3.10, whose tasks do not count cancellations. None: no limit."""
    if delay_s is None:
        yield
        return
    task: Any = asyncio.current_task()
    before = task.cancel
    expiring = expired = others = False

    def cancel(message: object = None) -> bool:
        nonlocal others
        others = others or not expiring
        return bool(before(message))

    def expire() -> None:
        nonlocal expiring, expired
        expiring = expired = True
        task.cancel()
        expiring = False

    task.cancel = cancel
    timer = asyncio.get_running_loop().call_later(delay_s, expire)
    try:
        yield
    except asyncio.CancelledError:
        if expired and not others:
            raise asyncio.TimeoutError from None
        raise
    finally:
        timer.cancel()
        if isinstance(before, types.FunctionType):  # set by an enclosing timeout
            task.cancel = before
        else:
            del task.cancel


if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    timeout = timeout_of_python_3_10
