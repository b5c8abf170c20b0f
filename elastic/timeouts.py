"""How long is waited for what is awaited: `async with timeout(seconds):`.

Not `asyncio.wait_for`: before Python 3.12 it returns, and forgets that it was cancelled, where the
work ends at that moment. A caller that cancels a task and waits for its end would then wait for
ever. Nor the package async_timeout: it forgets it where the time is over at that moment.
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
    """As asyncio's of Python 3.11, where tasks count cancellations. delay_s: None for no limit."""
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
        if isinstance(before, types.FunctionType):  # that of another such time around this one
            task.cancel = before
        else:
            del task.cancel


if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    timeout = timeout_of_python_3_10
