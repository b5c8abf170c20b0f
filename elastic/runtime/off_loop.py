"""Runs work that may block, such as file system calls, on threads beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Work: TypeAlias = Callable[[], Callable[[], None]]
"""Does the work and returns a function that reports its outcome."""


class _Threads:
    """Daemon threads, as many as there was work at once, kept because a new one delays the loop.

    Unlike a thread of `asyncio.to_thread`, a daemon thread that a file system blocks for ever does
    not keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def do(self, work: Work) -> None:
        """Run work on a thread. Raises RuntimeError if no thread can be started."""
        with self._lock:
            starts = self._idle == 0
            if not starts:
                self._idle -= 1
        if starts:
            threading.Thread(target=self._run, name="elastic-off-loop", daemon=True).start()
        self._work.put(work)

    def _run(self) -> None:
        while True:
            tell = self._work.get()()
            with self._lock:  # before `tell`: the caller may submit more work at once
                self._idle += 1
            tell()


_threads = _Threads()


async def off_loop(work: Callable[[], T]) -> T:
    """Run `work` on another thread and return or raise what it does.

    If this call is cancelled, it ends at once while the work goes on. Raises RuntimeError if no
    thread can be started.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> Callable[[], None]:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - raised again in the caller
            error = raised
        return functools.partial(tell, result, error)

    def tell(result: T | None, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    _threads.do(run)
    return await outcome
