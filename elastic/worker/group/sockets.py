"""Which TCP connections of this process belong to a process group, and how to cut them.

gloo offers no way to free a thread that is blocked in a collective. Shutting down the sockets
does: the blocked call raises within a millisecond. They are found by comparing the process's
connections before and after the group was built.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Connection:
    """An open TCP connection: its descriptor, and the inode that tells it from a later one."""

    descriptor: int
    inode: int
    local_port: int


def connections() -> frozenset[Connection]:
    """All connected TCP sockets of this process; listening ones are none.

    (gloo ends the process if its listening socket is shut down.)
    """
    return frozenset(_scan())


def _scan() -> Iterator[Connection]:
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with _borrowed(descriptor) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                sock.getpeername()
                yield Connection(descriptor, found.st_ino, sock.getsockname()[1])
        except OSError:
            continue  # closed meanwhile, or not connected


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The descriptor as a socket object that does not close it."""
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def shut_down(doomed: Iterable[Connection], how: int = socket.SHUT_RDWR) -> None:
    """Shut the connections down, those that are still the same ones."""
    for connection in doomed:
        with contextlib.suppress(OSError):
            if os.fstat(connection.descriptor).st_ino != connection.inode:
                continue
            with _borrowed(connection.descriptor) as sock:
                sock.shutdown(how)
