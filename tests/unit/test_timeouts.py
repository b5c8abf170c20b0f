"""A timeout that expires ends the wait; a cancellation is never taken for an expiry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from elastic import timeouts

Waits = Callable[[], Awaitable[Any]]


@pytest.fixture(params=["timeout", "timeout_of_python_3_10"])
def timeout(request: pytest.FixtureRequest) -> Any:
    return getattr(timeouts, request.param)


async def _sleeps() -> None:
    await asyncio.sleep(30.0)


WAITS: dict[str, Waits] = {
    "a future": lambda: asyncio.get_running_loop().create_future(),
    "a task": lambda: asyncio.ensure_future(_sleeps()),
    "several": lambda: asyncio.gather(_sleeps(), _sleeps()),
    "a shield": lambda: asyncio.shield(_sleeps()),
}
waits = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)


@waits
async def test_a_timeout_that_expires_ends_the_wait(timeout: Any, wait: Waits) -> None:
    with pytest.raises(asyncio.TimeoutError):
        async with timeout(0.01):
            await wait()


async def test_work_that_ends_in_time_is_not_cancelled(timeout: Any) -> None:
    async with timeout(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)


async def test_a_wait_without_a_limit_goes_on_to_its_end(timeout: Any) -> None:
    async with timeout(None):
        assert await asyncio.sleep(0.01, "done") == "done"


async def test_of_two_nested_timeouts_only_the_one_that_expires_raises(timeout: Any) -> None:
    async with timeout(5.0):
        with pytest.raises(asyncio.TimeoutError):
            async with timeout(0.01):
                await _sleeps()
    inner_ended = False

    async def waits_inside() -> None:
        nonlocal inner_ended
        try:
            async with timeout(5.0):
                await _sleeps()
        except asyncio.TimeoutError:
            inner_ended = True

    with pytest.raises(asyncio.TimeoutError):
        async with timeout(0.01):
            await waits_inside()
    assert not inner_ended


@waits
@pytest.mark.parametrize("first", ["the time", "the cancellation"])
@pytest.mark.parametrize("whose", ["its own", "that of the task that waits for it"])
async def test_a_cancellation_at_the_moment_of_the_expiry_is_not_lost(
    timeout: Any, wait: Waits, first: str, whose: str
) -> None:
    """Expiry and cancellation come in one turn of the loop, before the task runs again."""
    loop, delay_s = asyncio.get_running_loop(), 0.02

    async def waits_again_and_again() -> None:
        while True:
            try:
                async with timeout(delay_s):
                    await wait()
            except asyncio.TimeoutError:
                continue

    async def waits_for_it() -> None:
        await task

    task = loop.create_task(waits_again_and_again())
    outer = loop.create_task(waits_for_it()) if whose != "its own" else task
    await asyncio.sleep(0)
    loop.call_later(delay_s * (0.5 if first == "the cancellation" else 1.5), lambda: outer.cancel())
    time.sleep(2 * delay_s)  # both are due now
    await asyncio.wait([task, outer], timeout=1.0)
    assert task.cancelled()
    assert outer.cancelled()
