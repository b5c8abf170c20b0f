"""Blocking calls run in threads beside the event loop, and the process can end without them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from elastic.runtime.off_loop import off_loop

HANGS = """
import asyncio, threading
from elastic.runtime.off_loop import off_loop

async def main():
    task = asyncio.ensure_future(off_loop(threading.Event().wait))
    await asyncio.wait([task], timeout=0.01)
    task.cancel()

asyncio.run(main())
print("ended")
"""


async def test_off_loop_returns_the_result_while_the_loop_goes_on() -> None:
    asked = threading.Event()

    def work() -> str:
        assert asked.wait(10)
        return threading.current_thread().name

    task = asyncio.ensure_future(off_loop(work))
    await asyncio.sleep(0)
    assert not task.done()
    asked.set()
    assert await task == "elastic-off-loop" != threading.current_thread().name


async def test_an_error_is_raised_where_it_is_awaited() -> None:
    def work() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await off_loop(work)


def test_work_that_never_ends_does_not_hold_up_the_end_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], timeout=60, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ended\n"


async def test_threads_are_reused_and_concurrent_work_gets_one_each() -> None:
    for _ in range(100):
        await off_loop(lambda: None)
    before = threading.active_count()
    for _ in range(100):
        await off_loop(lambda: None)
    assert threading.active_count() == before
    together = threading.Barrier(5)
    await asyncio.gather(*[off_loop(lambda: together.wait(10)) for _ in range(5)])
    grown = threading.active_count()
    for _ in range(20):
        await asyncio.gather(*[off_loop(lambda: None) for _ in range(5)])
    assert threading.active_count() == grown
