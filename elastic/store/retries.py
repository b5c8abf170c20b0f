"""Asks the store again until it answers; waits with a limit that loses no cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from elastic.errors import TransientError
from elastic.store.interface import GuardFailed, LeaseLost

AnswerT = TypeVar("AnswerT")

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 0.5


async def retry(ask: Callable[[], Awaitable[AnswerT]], what: str) -> AnswerT:
    """Call `ask()` until it raises no TransientError, for ever if necessary.

    Doing it twice must do no harm: a call that failed may have been carried out. GuardFailed and
    LeaseLost are answers, and are raised.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except (GuardFailed, LeaseLost):
            raise
        except TransientError as error:
            _LOG.warning("%s: trying again: %s", what, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def within(work: Awaitable[AnswerT], seconds: float) -> AnswerT:
    """The result of `work`. After `seconds`, cancel `work`, wait until it has ended, and raise
    asyncio.TimeoutError.

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
