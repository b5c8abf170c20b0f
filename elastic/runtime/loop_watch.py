"""Detects when something blocks a daemon's event loop, and records where.

While the loop is blocked, the daemon handles no failure, no signal and no request. It also notices
afterwards that the whole process was stopped. The loop sets a
timer before each round of callbacks and disarms it when it waits again. A thread waits for that
timer and looks at the stack of the loop's thread. So nothing wakes up while all rounds are short: a
daemon shares its cores with workers, and every wake-up delays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import selectors
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.whereabouts import Frame
from elastic.errors import TransientError
from elastic.runtime.journal import Journal
from elastic.runtime.stack_file import stacks_of_threads

_LONG_S = 0.05
_ALARM_S = 0.03  # the thread looks before a round counts as long
_LOOK_S = 0.02
_TOLD_EVERY_S = 10.0
_FRAMES = 6
_STOPPED_S = 2.0  # a shorter time without running is a busy machine's
_LONGEST_WAIT_S = 1.0  # for the loop, which otherwise could not tell a stop from a wait for events


@dataclass(slots=True)
class LoopPauses:
    """Number and length of a loop's pauses, for metrics."""

    longest_s: float = 0.0
    """The longest pause so far; 0 if none was long enough to count."""
    count: int = 0
    total_s: float = 0.0
    stopped_s: float = 0.0
    """How long the process did not run when it was stopped last, at least."""
    runs_since: float = 0.0
    """When it ran again (monotonic seconds); 0: it was not stopped."""


class LoopWatch:
    """Watches the running loop; records its pauses in the journal and in `pauses`."""

    def __init__(self, journal: Journal, pauses: LoopPauses | None = None) -> None:
        self.pauses = pauses if pauses is not None else LoopPauses()
        self._journal = journal
        self._loop_thread = threading.get_ident()
        self._told_at = -_TOLD_EVERY_S
        self._untold = 0
        self._busy_since = 0.0
        self._seen = _Seen()
        self._ends = False
        self._alarm = _Alarm()
        self._thread = threading.Thread(target=self._look, name="elastic-loop-watch", daemon=True)
        self._thread.start()
        # The loop calls `select` once in each round, with any selector of the standard library.
        self._selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        self._select = self._selector.select
        self._selector.select = self._wait
        self._round_begins()  # last: on a busy machine the thread's start takes long

    def close(self) -> None:
        self._selector.select = self._select
        self._ends = True
        self._alarm.set(_AT_ONCE)
        self._thread.join()
        self._alarm.close()

    # ---- on the loop

    def _wait(self, timeout: float | None = None) -> Any:
        """Replaces the selector's `select`, which the loop calls after a round of callbacks."""
        if self._round_ends():
            timeout = 0  # the record may have given the loop something to do
        wait_s = min(timeout, _LONGEST_WAIT_S) if timeout is not None else _LONGEST_WAIT_S
        began = _boot_time_s()
        try:
            return self._select(wait_s)
        finally:
            self._ran_again(_boot_time_s() - began - wait_s)
            self._round_begins()

    def _round_begins(self) -> None:
        self._busy_since = time.monotonic()
        self._alarm.set(_IN_A_WHILE)

    def _round_ends(self) -> bool:
        """Return whether anything was recorded."""
        self._alarm.set(_NEVER)
        now, began, seen = time.monotonic(), self._busy_since, self._seen
        self._busy_since = 0.0
        pause_s = now - began
        # If the thread was as late, the machine was busy, or a signal had stopped the process.
        if seen.round_began != began or not seen.where or pause_s - seen.late_s < _LONG_S:
            return self._ran_again(seen.late_s if seen.round_began == began else pause_s)
        pauses = self.pauses
        pauses.longest_s = max(pauses.longest_s, pause_s)
        pauses.count, pauses.total_s = pauses.count + 1, pauses.total_s + pause_s
        self._tell(now, pause_s, seen.where)
        return True

    def _ran_again(self, late_s: float) -> bool:
        """The process runs `late_s` later than it should. Return whether it was stopped."""
        if late_s < _STOPPED_S:
            return False
        self.pauses.stopped_s, self.pauses.runs_since = late_s, time.monotonic()
        self._journal.record("process_stopped", stopped_s=round(late_s, 3))
        return True

    def _tell(self, now: float, pause_s: float, where: str) -> None:
        if now - self._told_at < _TOLD_EVERY_S:
            self._untold += 1
            return
        untold, self._untold, self._told_at = self._untold, 0, now
        self._journal.record("loop_paused", pause_s=round(pause_s, 3), where=where, others=untold)

    # ---- on its own thread

    def _look(self) -> None:
        while True:
            self._alarm.wait()
            if self._ends:
                return
            began = self._busy_since
            if began:
                self._follow(began)

    def _follow(self, began: float) -> None:
        """Record where the unfinished round is, and how late this thread itself runs."""
        due = began + _ALARM_S
        where = _stack(stacks_of_threads().get(self._loop_thread, ()))
        late_s = 0.0
        while self._busy_since == began and not self._ends:
            now = time.monotonic()
            late_s = max(late_s, now - due)
            self._seen = _Seen(began, where, late_s)
            due = now + _LOOK_S
            time.sleep(_LOOK_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the thread has seen of a round; `late_s` is how late the thread itself was."""

    round_began: float = 0.0
    where: str = ""
    late_s: float = 0.0


class _Alarm:
    """A timer of the kernel (timerfd_create(2)), which Python offers only from 3.13 on.

    Unlike a lock or an event, setting it wakes no thread; the thread that waits wakes when the
    timer expires. Raises TransientError if the kernel refuses the timer.
    """

    def __init__(self) -> None:
        self._descriptor = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._descriptor < 0:
            raise TransientError(
                f"no timer to watch the event loop: {os.strerror(ctypes.get_errno())}; free file "
                "descriptors (see `ulimit -n`), or try again"
            )

    def set(self, times: Any) -> None:
        """Let it expire once, after this time from now; `_NEVER` disarms it."""
        _libc.timerfd_settime(self._descriptor, 0, times, None)

    def wait(self) -> None:
        os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)


_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the calls are short
_Times = ctypes.c_long * 4  # struct itimerspec: interval and first time, in s and ns
_IN_A_WHILE = _Times(0, 0, 0, round(_ALARM_S * 1e9))
_AT_ONCE, _NEVER = _Times(0, 0, 0, 1), _Times(0, 0, 0, 0)


def _boot_time_s() -> float:
    """A clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _stack(frames: Sequence[Frame]) -> str:
    """Return the innermost frames, one a line, the innermost one last."""
    if not frames or frames[0].file == selectors.__file__:
        return ""  # the loop waits, or its event has come and the machine is too busy to run it
    return "\n".join(f"{f.file}:{f.line} in {f.function}" for f in reversed(frames[:_FRAMES]))


@contextlib.contextmanager
def watched_loop(journal: Journal, pauses: LoopPauses | None = None) -> Iterator[LoopWatch]:
    """Watch the running loop in this context, and shorten its pauses for garbage collection."""
    watch = LoopWatch(journal, pauses)
    collections = ShortCollections()
    thresholds = gc.get_threshold()
    gc.callbacks.append(collections)
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield watch
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collections)
        gc.unfreeze()
        watch.close()


_OLDEST = 2  # the generation of a full collection
_GROWN = 2
_THRESHOLDS = 700, 10, 1
"""A full collection follows two of younger objects: it looks at some 15,000 new objects, which
takes a few ms. The first two values are the defaults of Python before 3.13."""


class ShortCollections:
    """A callback of the garbage collector that makes full collections skip known objects.

    It suits a process that keeps most of its objects. A full collection looks at every object: with
    a thousand agents that blocks the loop for 50 ms. So objects that have survived a full
    collection are frozen, and later ones skip them until their number has doubled. Then all are
    unfrozen, and cycles among them that have become garbage are found.
    """

    def __init__(self) -> None:
        self._in_use = self._passed_over = 0  # upper bounds: some objects are gone

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < _OLDEST:
            return
        if phase == "stop":
            self._passed_over += len(gc.get_objects(_OLDEST))
            self._in_use = self._in_use or self._passed_over
            gc.freeze()
        elif self._passed_over > _GROWN * self._in_use:
            self._passed_over = gc.get_freeze_count()  # exact, but takes a while
            if self._passed_over > _GROWN * self._in_use:
                gc.unfreeze()
                self._in_use = self._passed_over = 0
