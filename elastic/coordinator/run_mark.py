"""Keeps the files of one run from being written by another run, which would spoil both records."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
from pathlib import Path

_GET, _SET = 36, 37  # F_OFD_GETLK and F_OFD_SETLK: a Python built with an old libc lacks the names
_FIRST = 1 << 40  # no file has its data there
_PLACES = 1 << 40
_LOCK = "hhqqi0q"  # struct flock: type, whence, start, length, pid


class WrittenByAnother(BlockingIOError):
    """Another run writes the file. This passes when that run ends."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "another run is writing it, and would spoil it")


class Mark:
    """Marks a file as written by one run, until it is removed or this process ends.

    All leaders of a run may mark a file at the same time: one that was deposed, that is frozen or
    whose host is gone does not keep the next one from writing. So the mark is a shared lock on a
    byte that belongs to the run, and nobody may hold one on the bytes of others. Where a file
    system knows no such locks, there is no mark.
    """

    def __init__(self, run: str) -> None:
        digest = hashlib.sha256(run.encode()).digest()
        self._place = int.from_bytes(digest[:8], "big") % _PLACES
        self._descriptor: int | None = None

    def set(self, path: Path) -> None:
        """Raises WrittenByAnother if the file is marked by another run."""
        self.remove()
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.stat().st_mode):  # others are not spoilt, such as /dev/null
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor is None:
            return
        try:
            fcntl.fcntl(self._descriptor, _SET, _lock(fcntl.F_RDLCK, self._place, 1))
            below = self._is_locked(0, self._place)
            is_anothers = below or self._is_locked(self._place + 1, _PLACES)
        except OSError:
            return
        if is_anothers:
            self.remove()
            raise WrittenByAnother

    def remove(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _is_locked(self, first: int, end: int) -> bool:
        """Whether another process, or another mark of this one, holds a place from first to end."""
        if first == end:
            return False  # a length of 0 means all the rest
        assert self._descriptor is not None
        asked = _lock(fcntl.F_WRLCK, first, end - first)
        found = fcntl.fcntl(self._descriptor, _GET, asked)
        kind: int = struct.unpack(_LOCK, found)[0]
        return kind != fcntl.F_UNLCK


def _lock(kind: int, place: int, length: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, _FIRST + place, length, 0)
