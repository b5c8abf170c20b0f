"""Which TCP connections of this process belong to a process group, and how to cut them.

gloo offers no way to free a thread that is blocked in a collective. Shutting down the sockets
does: the blocked call raises within a millisecond. Each member's gloo listens at one port, and of
the two ends of a pair's connection one has that port for its own, the other for its peer's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Connection:
    """An open TCP connection: its descriptor, and the inode that tells it from a later one."""

    descriptor: int
    inode: int
    local_port: int
    peer_port: int


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that takes connections."""

    inode: int
    port: int


def connections() -> frozenset[Connection]:
    """All connected TCP sockets of this process; listening ones are none.

    (gloo ends the process if its listening socket is shut down.)
    """
    return frozenset(_scan(_connection))


def listeners() -> frozenset[Listener]:
    """All listening TCP sockets of this process."""
    return frozenset(_scan(_listener))


def opened_by_python() -> set[int]:
    """The descriptors of all sockets that Python code has opened: none of torch's.

    Looks at every object there is, which takes tens of milliseconds.
    """
    return {o.fileno() for o in gc.get_objects() if issubclass(type(o), socket.socket)}


def _connection(sock: socket.socket, inode: int) -> Connection:
    peer_port = sock.getpeername()[1]
    return Connection(sock.fileno(), inode, sock.getsockname()[1], peer_port)


def _listener(sock: socket.socket, inode: int) -> Listener | None:
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return Listener(inode, sock.getsockname()[1]) if listens else None


def _scan(describe: Callable[[socket.socket, int], object]) -> Iterator[Any]:
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with _borrowed(descriptor) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    described = describe(sock, found.st_ino)
                    if described is not None:
                        yield described
        except OSError:
            continue  # closed meanwhile, or not connected


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The descriptor as a socket object that does not close it.

    SOCK_NONBLOCK says that it has no time-out, and leaves it as it is: else Python would make it
    non-blocking where the script has called socket.setdefaulttimeout(), and torch, which shares it,
    would read rubbish.
    """
    sock = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
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
