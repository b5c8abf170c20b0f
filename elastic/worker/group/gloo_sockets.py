"""Frees threads that are blocked in gloo, which offers no way to do that.

Shutting down the group's sockets does: the blocked call raises within a millisecond. They are found
by port: each member's gloo listens at one, which is the local port at one end of a connection and
the peer's at the other. While a group still connects, the sockets that Python code has opened are
told from gloo's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_OPENING_S = 0.002


class GroupSockets:
    """Finds the sockets of one group, from before it connects. Any thread may cut them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections_before: frozenset[Connection] | None = None
        self._listeners_before: frozenset[Listener] = frozenset()
        self._built: frozenset[Connection] | None = None
        self._own_store_port = 0

    def begin(self, *, own_store_port: int) -> None:
        """The group is about to connect. own_store_port: that of the store that this process
        hosts; its clients may belong to a later generation already."""
        self._own_store_port = own_store_port
        with self._lock:
            self._connections_before, self._listeners_before = connections(), listeners()

    def ports(self) -> set[int]:
        """The ports at which this process has listened since."""
        return {listener.port for listener in listeners() - self._listeners_before}

    def built(self, ports: Collection[int]) -> None:
        """The group has connected. ports: those at which its members and their store listen."""
        with self._lock:
            self._built = frozenset(
                c for c in self._new() if c.local_port in ports or c.peer_port in ports
            )

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        shut_down(self._to_cut(), how)

    def are_cut(self, *, only_to_port: int | None = None) -> bool:
        """Whether a connection is down, or one to a peer's port."""
        built = self._built or ()
        return any(is_down(c) for c in built if only_to_port in (None, c.peer_port))

    def descriptors(self) -> list[int]:
        return [c.descriptor for c in self._built or () if _is_open(c)]

    def _to_cut(self) -> frozenset[Connection]:
        """While the group forms, others' ports are unknown."""
        with self._lock:
            if self._built is not None or self._connections_before is None:
                return self._built or frozenset()
            new = self._new()
            scripts = opened_by_python()  # after: includes what a script opens meanwhile
            time.sleep(_OPENING_S)  # a thread may have a descriptor and no object yet
            scripts |= opened_by_python()
            return frozenset(c for c in new if c.descriptor not in scripts)

    def _new(self) -> frozenset[Connection]:
        new = connections() - (self._connections_before or frozenset())
        return frozenset(c for c in new if c.local_port != self._own_store_port)


@dataclass(frozen=True, slots=True)
class Connection:
    """An open TCP connection: its descriptor, and the inode that tells it from a later one."""

    descriptor: int
    inode: int
    local_port: int
    peer_port: int


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket."""

    inode: int
    port: int


def connections() -> frozenset[Connection]:
    """Return all connected TCP sockets of this process, without listening ones.

    (gloo ends the process if its listening socket is shut down.)
    """
    return frozenset(_scan(_connection))


def listeners() -> frozenset[Listener]:
    return frozenset(_scan(_as_listener))


def opened_by_python() -> set[int]:
    """Return the descriptors of all sockets that Python code has opened: none of them is torch's.

    Looks at every object of the process, which takes tens of milliseconds.
    """
    return {o.fileno() for o in gc.get_objects() if issubclass(type(o), socket.socket)}


def _connection(sock: socket.socket, inode: int) -> Connection:
    peer_port = sock.getpeername()[1]
    return Connection(sock.fileno(), inode, sock.getsockname()[1], peer_port)


def _as_listener(sock: socket.socket, inode: int) -> Listener | None:
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
    """Yield the descriptor as a socket object that does not close it.

    SOCK_NONBLOCK tells Python that the socket has no time-out, and changes nothing. Without it, if
    the script has called socket.setdefaulttimeout(), Python would make the socket non-blocking, and
    torch, which shares it, would read garbage.
    """
    sock = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()


def is_down(connection: Connection) -> bool:
    """Whether it was closed here, or by the other end."""
    look = select.poll()
    look.register(connection.descriptor, select.POLLRDHUP)
    # In this order: the descriptor may be closed meanwhile, and be another file's.
    return bool(look.poll(0)) or not _is_open(connection)


def _is_open(connection: Connection) -> bool:
    """Whether its descriptor is still the connection's, and no other file's."""
    try:
        return os.fstat(connection.descriptor).st_ino == connection.inode
    except OSError:
        return False


def shut_down(doomed: Iterable[Connection], how: int = socket.SHUT_RDWR) -> None:
    """Shut down those connections that are still the same ones."""
    for connection in filter(_is_open, doomed):
        with contextlib.suppress(OSError), _borrowed(connection.descriptor) as sock:
            sock.shutdown(how)


@contextlib.contextmanager
def gloo_made_by(made_by: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Within, `made_by` calls gloo's constructor, which waits for a peer that has given up until
    its time-out, in C++, where nothing can stop it."""
    c10d: Any = dist.distributed_c10d
    original: Any = getattr(c10d, "ProcessGroupGloo", None)
    if original is None:  # torch was built without gloo
        yield
        return

    class Made(type):
        def __call__(cls, *args: Any, **named: Any) -> Any:
            return made_by(lambda: original(*args, **named))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    c10d.ProcessGroupGloo = Made("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original
