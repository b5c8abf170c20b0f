"""For how long the script's thread was ready to run and had no core: the kernel's own count."""

from __future__ import annotations

import contextlib
import os


class CoreWait:
    """Of the main thread, from any thread; 0 where the kernel does not tell (schedstat)."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._tried = False

    def seconds(self) -> float:
        """Since the thread began. Takes a microsecond."""
        if not self._tried:
            self._tried = True
            path = "/proc/self/schedstat"  # of the main thread
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor is None:
            return 0.0
        try:
            return int(os.pread(self._descriptor, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
