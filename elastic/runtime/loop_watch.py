"""Notices when something holds up a daemon's event loop, and says what it was.

While the loop stands still nobody is heard: no failure, no signal, no question. Before each round
of its callbacks the loop sets a timer, and takes it back when it waits again. A thread waits for
that timer and looks at the stack of the loop's thread. So nobody is woken as long as no round lasts
long: a daemon shares its cores with workers, and every wake-up delays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from elastic.errors import TransientError
from elastic.runtime.journal import Journal

_LONG_S = 0.05
_ALARM_S = 0.03  # the thread looks before a round has become long
_LOOK_S = 0.02
_TOLD_EVERY_S = 10.0
_FRAMES = 6


@dataclass(slots=True)
class LoopPauses:
    """What is known of a loop's pauses."""

    longest_s: float = 0.0
    """The longest so far, in seconds; 0 if none was worth telling."""
    count: int = 0
    total_s: float = 0.0


class LoopWatch:
    """Of the running loop; what it finds goes to the journal and into `pauses`."""

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
        # Both selectors of the standard library are asked once in each round.
        self._selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        self._select = self._selector.select
        self._selector.select = self._wait
        self._round_begins()  # on a busy machine the start of a thread takes long

    def close(self) -> None:
        """Look no more."""
        self._selector.select = self._select
        self._ends = True
        self._alarm.set(_AT_ONCE)
        self._thread.join()
        self._alarm.close()

    # ---- on the loop

    def _wait(self, timeout: float | None = None) -> Any:
        """In place of the selector's: a round of callbacks is over, and the loop waits."""
        if self._round_ends():
            timeout = 0  # what was told may have given the loop something to do
        try:
            return self._select(timeout)
        finally:
            self._round_begins()

    def _round_begins(self) -> None:
        self._busy_since = time.monotonic()
        self._alarm.set(_IN_A_WHILE)

    def _round_ends(self) -> bool:
        """Returns whether it was told of."""
        self._alarm.set(_NEVER)
        now, began, seen = time.monotonic(), self._busy_since, self._seen
        self._busy_since = 0.0
        pause_s = now - began
        # What was as late on the thread was the machine's, or somebody has stopped the process.
        if seen.round_began != began or not seen.where or pause_s - seen.late_s < _LONG_S:
            return False
        pauses = self.pauses
        pauses.longest_s = max(pauses.longest_s, pause_s)
        pauses.count, pauses.total_s = pauses.count + 1, pauses.total_s + pause_s
        self._tell(now, pause_s, seen.where)
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
        """A round that began then has not ended: see where it is, and how late this thread runs."""
        due = began + _ALARM_S
        where = _stack(sys._current_frames().get(self._loop_thread))
        late_s = 0.0
        while self._busy_since == began and not self._ends:
            now = time.monotonic()
            late_s = max(late_s, now - due)
            self._seen = _Seen(began, where, late_s)
            due = now + _LOOK_S
            time.sleep(_LOOK_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the thread has seen of a round, and by how much it was late itself."""

    round_began: float = 0.0
    where: str = ""
    late_s: float = 0.0


class _Alarm:
    """A timer of the kernel's. To set it wakes no thread, as it would with a lock or an event; only
    when it expires does the one that waits go on. Python has such timers from 3.13 on.

    Raises TransientError if the kernel refuses it.
    """

    def __init__(self) -> None:
        self._descriptor = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._descriptor < 0:
            raise TransientError(
                f"no timer for watching the event loop: {os.strerror(ctypes.get_errno())}; close "
                "what holds descriptors (see `ulimit -n`), or try again"
            )

    def set(self, times: Any) -> None:
        """It expires once, after this time from now on."""
        _libc.timerfd_settime(self._descriptor, 0, times, None)

    def wait(self) -> None:
        """Return when it has expired."""
        os.read(self._descriptor, 8)

    def close(self) -> None:
        """Nobody waits for it any more."""
        os.close(self._descriptor)


_libc = ctypes.PyDLL(None, use_errno=True)  # calls too short to let other threads run meanwhile
_Times = ctypes.c_long * 4  # struct itimerspec: interval and first time, in s and ns
_IN_A_WHILE = _Times(0, 0, 0, round(_ALARM_S * 1e9))
_AT_ONCE, _NEVER = _Times(0, 0, 0, 1), _Times(0, 0, 0, 0)


def _stack(frame: FrameType | None) -> str:
    """The innermost frames, one a line, the place that holds everything up last."""
    if frame is None or frame.f_code.co_filename == selectors.__file__:
        return ""  # it waits: whatever it waits for came, and the machine let it wait on
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return "\n".join(f"{f.filename}:{f.lineno} in {f.name}" for f in frames)


@contextlib.contextmanager
def watched_loop(journal: Journal, pauses: LoopPauses | None = None) -> Iterator[LoopWatch]:
    """Within, the running loop is watched, and hardly held up by the garbage collector."""
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


_OLDEST = 2  # objects that collections of younger ones have left
_GROWN = 2
_THRESHOLDS = 700, 10, 1
"""A full collection after two of younger objects: of some 15,000 objects, which takes a few ms. The
first two are those of Python before 3.13."""


class ShortCollections:
    """A callback of the garbage collector, for a process that keeps most of what it has.

    A full collection looks at every object: 50 ms with a thousand agents, in which nobody is heard.
    What one has found to be in use, later ones pass over, until there is twice as much: cycles in
    it that have become garbage are found then.
    """

    def __init__(self) -> None:
        self._in_use = self._passed_over = 0  # objects, at most: some have ended since

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """A collection of objects up to some age begins or has ended."""
        if info["generation"] < _OLDEST:
            return
        if phase == "stop":
            self._passed_over += len(gc.get_objects(_OLDEST))
            self._in_use = self._in_use or self._passed_over
            gc.freeze()
        elif self._passed_over > _GROWN * self._in_use:
            self._passed_over = gc.get_freeze_count()  # takes a while, too
            if self._passed_over > _GROWN * self._in_use:
                gc.unfreeze()
                self._in_use = self._passed_over = 0
