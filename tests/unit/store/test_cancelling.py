"""A cancellation is never swallowed, not even at the moment of the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic.store.etcd.connection import Channel, Stream
from elastic.store.retries import within


class Call:
    """A bidirectional call whose writes wait for `taken`."""

    def __init__(self) -> None:
        self.taken = asyncio.get_running_loop().create_future()

    async def write(self, request: object) -> None:
        del request
        await self.taken


def _send(call: Call) -> Coroutine[Any, Any, None]:
    stream: Stream[Any, Any] = Stream(Channel(None), call)  # type: ignore[arg-type]
    return stream.send("request", timeout_s=10.0)


def _within(call: Call) -> Coroutine[Any, Any, None]:
    return within(call.write("request"), 10.0)


@pytest.mark.parametrize("waiting", [_send, _within])
async def test_a_cancellation_at_the_moment_of_the_result_is_raised(
    waiting: Callable[[Call], Coroutine[Any, Any, None]],
) -> None:
    call = Call()
    task = asyncio.create_task(waiting(call))
    await asyncio.sleep(0.01)
    call.taken.set_result(None)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_takes_too_long_is_cancelled_and_has_ended() -> None:
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0)
            ended = True

    with pytest.raises(asyncio.TimeoutError):
        await within(work(), 0.01)
    assert ended


async def test_results_and_errors_are_passed_on() -> None:
    async def raises() -> None:
        raise KeyError("key")

    assert await within(asyncio.sleep(0, "result"), 10.0) == "result"
    with pytest.raises(KeyError):
        await within(raises(), 10.0)
