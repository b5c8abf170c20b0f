"""The shared file that tells a job's processes, at any time, which of their calls must fail."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from tests.faults.points import COUNTED_ROLES, FUNCTIONS, Point

_HAS_FIRED = 2


class _Layout(ctypes.Structure):
    """The layout of `struct point` in failing_calls.c."""

    _fields_ = [
        ("role", ctypes.c_int32),
        ("function", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("number", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("fired", ctypes.c_int32),
        ("fired_pid", ctypes.c_int32),
        ("fired_error", ctypes.c_int32),
        ("told", ctypes.c_char * 988),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """The call that has failed."""

    pid: int
    error: int
    """The point's, or ECONNRESET for a read or write of a socket."""
    about: str
    """Its thread, and its path or the library that made it."""


class ArmedPoint:
    """Arms points and reads which call has failed. Make it before the job starts."""

    def __init__(self, folder: Path) -> None:
        with (folder / "point").open("w+b") as file:
            os.ftruncate(file.fileno(), ctypes.sizeof(_Layout))
            self._shared = _Layout.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Layout)))

    def arm(self, point: Point, pid: int = 0) -> None:
        """Make a call fail from now on. pid: the process that counts its calls from now on; 0: each
        process counts from its start."""
        self.disarm()
        shared = self._shared
        shared.fired = shared.fired_pid = shared.calls = 0
        shared.function, shared.number = FUNCTIONS.index(point.function), point.number
        shared.error, shared.pid = point.error, pid
        shared.role = COUNTED_ROLES.index(point.role) + 1

    def disarm(self) -> None:
        self._shared.role = 0

    @property
    def fired(self) -> Fired | None:
        """The call that has failed since the point was armed."""
        if self._shared.fired != _HAS_FIRED:
            return None
        about = self._shared.told.decode(errors="replace")
        return Fired(pid=self._shared.fired_pid, error=self._shared.fired_error, about=about)
