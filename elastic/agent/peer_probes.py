"""Finds out which workers of other nodes this node reaches, by connections that send nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import time
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from elastic.runtime.network import listen_as

Name = TypeVar("Name", bound=Hashable)
_AGAIN_AFTER = 0.5  # of the time: the kernel repeats a lost packet only after a second
_TIMED_OUT = "no answer"


async def open_probe_port(host: str) -> asyncio.Server | None:
    """Accept connections to the node's address `host` at a port that the kernel chooses, as for
    gloo and NCCL, and close them at once. None: the system refuses that."""
    try:
        return await asyncio.start_server(lambda _, writer: writer.close(), sock=listen_as(host, 0))
    except OSError:
        return None


def port_of(server: asyncio.Server | None) -> int:
    """The port at which it listens; 0 without a server."""
    return server.sockets[0].getsockname()[1] if server is not None else 0


def unreached(endpoints: Mapping[Name, str], within_s: float) -> dict[Name, str]:
    """Connect to each endpoint; return why that failed, by the name of the endpoint.

    endpoints: host:port by name. within_s: the time for all of them together. Blocks that long if
    one does not answer, and longer if a host's name is looked up. The kernel completes connections,
    so neither a busy process at the other end nor a delay of this thread counts.
    """
    failed: dict[Name, str] = {}
    probes = [_Probe(name, endpoint) for name, endpoint in endpoints.items()]
    try:
        ends_at = time.monotonic() + within_s
        again_at = ends_at - _AGAIN_AFTER * within_s
        for probe in probes:
            probe.connect()
        while any(p.pending for p in probes) and (now := time.monotonic()) < ends_at:
            _wait(probes, (again_at if now < again_at else ends_at) - now)
            if time.monotonic() >= again_at and now < again_at:
                for probe in (p for p in probes if p.pending):
                    probe.connect()
        _wait(probes, 0.0)
        failed = {p.name: p.why or _TIMED_OUT for p in probes if not p.reached}
    finally:
        for probe in probes:
            probe.close()
    return failed


class _Probe(Generic[Name]):
    """The attempts to connect to one endpoint."""

    def __init__(self, name: Name, endpoint: str) -> None:
        self.name = name
        self.reached, self.why = False, ""
        self.sockets: dict[int, socket.socket] = {}
        host, _, port = endpoint.rpartition(":")
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            self._family, self._address = found[0][0], found[0][4]
        except (OSError, ValueError, OverflowError, UnicodeError) as error:
            self.why = str(error)

    @property
    def pending(self) -> bool:
        return not self.reached and not self.why

    def connect(self) -> None:
        if self.why:
            return
        try:
            connecting = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            self.reached = True  # no descriptor is left here, which says nothing about the peer
            return
        self.sockets[connecting.fileno()] = connecting
        code = connecting.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            self.settle(connecting.fileno(), code)

    def settle(self, descriptor: int, code: int) -> None:
        """One attempt has ended with this error; 0: it has reached the peer."""
        if code == 0:
            self.reached = True
        else:
            self.sockets.pop(descriptor).close()
            self.why = os.strerror(code)

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()


def _wait(probes: list[_Probe[Name]], within_s: float) -> None:
    """Wait until a pending attempt has ended."""
    by_descriptor = {fd: p for p in probes if p.pending for fd in p.sockets}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLOUT)
    for descriptor, _ in poll.poll(max(0.0, within_s) * 1000):
        probe = by_descriptor[descriptor]
        if probe.pending:
            sock = probe.sockets[descriptor]
            probe.settle(descriptor, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
