"""Tells that a process is being killed before the kernel has freed its memory.

Its connections break, and its pidfd becomes readable, only after that: 0.1 s later for each GB that
it holds. A robust mutex that its main thread has locked is marked as soon as that thread begins to
exit (get_robust_list(2)), and whoever waits for the mutex is woken.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

_NAME = "elastic-alive"
_LINK = f"/memfd:{_NAME}"
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_ATTRIBUTES_BYTES = 64  # more than a pthread_mutexattr_t has
_PARENT, _FLAGS, _EXIT_CODE = 1, 6, -1  # fields of /proc/PID/stat that follow the program's name
_EXITING = 0x4  # PF_EXITING
_SIGNAL = 0x7F
_libc = ctypes.CDLL(None, use_errno=True)


def hold() -> None:
    """Let a `DeathNotice` of another process tell of the end of this one's main thread, which is
    the caller. Raises OSError."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    mutex = _Mutex(descriptor)
    mutex.initialize()
    mutex.lock()
    mutex.stay_mapped()


class DeathNotice:
    """Tells of the end of a process that has called `hold`. Raises OSError."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mutex = _Mutex(_descriptor_of(pid))
        self._parent = _fields_of(pid)[_PARENT]

    def wait(self) -> int:
        """Return the number of the signal that kills the process, as soon as it begins to exit. 0:
        it exits by itself, with its parent, or runs another program. Raises OSError."""
        self._mutex.lock()
        self._mutex.release()
        fields = _fields_of(self._pid)
        is_killed = int(fields[_FLAGS]) & _EXITING and fields[_PARENT] == self._parent
        return int(fields[_EXIT_CODE]) & _SIGNAL if is_killed else 0


def _fields_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _descriptor_of(pid: int) -> int:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith(_LINK):
                return os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {pid} holds no mutex")


class _Mutex:
    """A robust mutex at the start of a page that processes share."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor of the page, and keeps it open: others find the page by it."""
        self._descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._page)))

    def initialize(self) -> None:
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(self._at, attributes)

    def stay_mapped(self) -> None:
        """Keep the page until the process is gone, also when the interpreter has ended: the kernel
        does not tell of a mutex that it cannot reach."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._page))

    def lock(self) -> None:
        """Returns, too, if the thread that had locked it has ended."""
        _libc.pthread_mutex_lock(self._at)

    def release(self) -> None:
        _libc.pthread_mutex_consistent(self._at)
        _libc.pthread_mutex_unlock(self._at)
        os.close(self._descriptor)
