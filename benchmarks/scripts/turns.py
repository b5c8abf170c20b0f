"""Lets jobs train in turns, so that changes of the machine's speed affect all sides alike.

The benchmark writes the total number of allowed steps to a file; a worker that has done that many
waits for more.
"""

from __future__ import annotations

import time
from pathlib import Path

_POLL_S = 0.1  # most workers wait most of the time, and must not slow down those that train


class Turns:
    """The worker's side. Without a file there is no limit."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._allowed = 0

    def wait(self, step: int) -> bool:
        """Wait until step `step` (from 0) may begin; return False if there are no more turns."""
        while self._path is not None and 0 <= self._allowed <= step:
            self._allowed = int(self._path.read_text())
            if 0 <= self._allowed <= step:
                time.sleep(_POLL_S)
        return self._allowed >= 0


def allow(path: Path, steps: int) -> None:
    """The benchmark's side: let workers do the steps below `steps`; -1 ends the training."""
    following = path.with_suffix(".next")
    following.write_text(str(steps))
    following.replace(path)
