"""Notices when something holds up a daemon's event loop, and says what it was.

While the loop stands still nobody is heard: no failure, no signal, no question. A thread looks at
the loop's beats, and at the stack of the loop's thread as soon as they stay away.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from elastic.runtime.journal import Journal

_BEAT_S = 0.02
_LONG_S = 0.05
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
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._begin()
        self._told_at = -_TOLD_EVERY_S
        self._untold = 0
        self._ends = threading.Event()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)
        self._thread = threading.Thread(target=self._look, name="elastic-loop-watch", daemon=True)
        self._thread.start()
        self._begin()  # on a busy machine the start of a thread takes long

    def close(self) -> None:
        """Look no more."""
        self._ends.set()
        self._timer.cancel()

    # ---- on the loop

    def _begin(self) -> None:
        self._beat_at = self._looked_at = time.monotonic()
        self._late_s, self._where = 0.0, ""

    def _beat(self) -> None:
        now = time.monotonic()
        pause_s = now - self._beat_at - _BEAT_S
        where, self._where = self._where, ""
        late_s, self._late_s = self._late_s, 0.0
        self._beat_at = now
        self._timer = self._loop.call_later(_BEAT_S, self._beat)
        # What was as late on the thread was the machine's, or somebody has stopped the process.
        if pause_s - late_s >= _LONG_S and where:
            pauses = self.pauses
            pauses.longest_s = max(pauses.longest_s, pause_s)
            pauses.count, pauses.total_s = pauses.count + 1, pauses.total_s + pause_s
            self._tell(now, pause_s, where)

    def _tell(self, now: float, pause_s: float, where: str) -> None:
        if now - self._told_at < _TOLD_EVERY_S:
            self._untold += 1
            return
        untold, self._untold, self._told_at = self._untold, 0, now
        self._journal.record("loop_paused", pause_s=round(pause_s, 3), where=where, others=untold)

    # ---- on its own thread

    def _look(self) -> None:
        while not self._ends.wait(_BEAT_S):
            now = time.monotonic()
            self._late_s = max(self._late_s, now - self._looked_at - _BEAT_S)
            self._looked_at = now
            if now - self._beat_at > _LONG_S and not self._where:
                self._where = _stack(sys._current_frames().get(self._loop_thread))


def _stack(frame: FrameType | None) -> str:
    """The innermost frames, one a line, the place that holds everything up last."""
    if frame is None or frame.f_code.co_filename == selectors.__file__:
        return ""  # it waits: whatever it waits for came, and the machine let it wait on
    frames = traceback.extract_stack(frame)[-_FRAMES:]
    return "\n".join(f"{f.filename}:{f.lineno} in {f.name}" for f in frames)


@contextlib.contextmanager
def watched_loop(journal: Journal, pauses: LoopPauses | None = None) -> Iterator[LoopWatch]:
    """Within, the running loop is watched."""
    watch = LoopWatch(journal, pauses)
    try:
        yield watch
    finally:
        watch.close()
