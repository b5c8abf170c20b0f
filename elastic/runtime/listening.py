"""Opens listening sockets, and says in words why an address cannot be listened at.

gRPC does not say why it fails to listen, so `require_listenable` tries the address first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import resource
import socket
from typing import Any

from elastic.errors import ConfigurationError, TransientError
from elastic.runtime.off_loop import off_loop
from elastic.timeouts import timeout

_RESOLVE_S = 5.0
_BACKLOG = 1024  # connections that are not accepted yet: they cost the kernel little
_MOST_DESCRIPTORS = 1 << 16
_ADVICE = "choose another with {} HOST:PORT, or :PORT for all interfaces"


async def require_listenable(address: str) -> None:
    """Check that a socket can be bound to HOST:PORT.

    Raises ConfigurationError, which says what is wrong with the address, and TransientError if no
    name server answers.
    """
    (await _listening(address, "listen", "--listen")).close()


async def listen_for_http(address: str, option: str = "--http-address") -> socket.socket:
    """Return a socket at HOST:PORT, which `option` has set. Raises as `require_listenable`."""
    return await _listening(address, "serve HTTP", option)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _listening(address: str, what: str, option: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    look = functools.partial(_first, host.strip("[]"), int(port))
    begin, advice = f"cannot {what} at {address}", _ADVICE.format(option)
    try:
        async with timeout(_RESOLVE_S):
            listener, problem = await off_loop(look)
    except asyncio.TimeoutError:
        raise TransientError(
            f"{begin}: no name server answers within {_RESOLVE_S:g} s; try again, or give an "
            "address instead of the name"
        ) from None
    except socket.gaierror as error:
        kind = TransientError if error.errno == socket.EAI_AGAIN else ConfigurationError
        raise kind(f"{begin}: the host does not resolve ({error.strerror}); {advice}") from error
    except UnicodeError as error:
        raise ConfigurationError(
            f"{begin}: that is not a valid host name ({error}); {advice}"
        ) from error
    if listener is None:
        raise ConfigurationError(f"{begin}: {problem}; {advice}")
    return listener


def _first(host: str, port: int) -> tuple[socket.socket | None, str]:
    """Return a socket at the first address that can be bound, else the first address's problem."""
    problems: list[str] = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, target in found:
        try:
            return _bound(family, kind, protocol, target), ""
        except OSError as error:
            problems.append(_words(error, str(target[0]), int(target[1])))
    return None, problems[0]


def _bound(family: int, kind: int, protocol: int, target: Any) -> socket.socket:
    """Return a listening socket; for "::" at IPv4 if there is no IPv6. Raises OSError."""
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT and target[0] == "::":
            return _bound(socket.AF_INET, kind, protocol, ("0.0.0.0", target[1]))
        raise
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(target)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _words(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use by another process"
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"{host} is not an address of this machine"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not use port {port}, nor any port below 1024 (CAP_NET_BIND_SERVICE)"
    return os.strerror(error.errno) if error.errno else str(error)


def allow_many_connections() -> None:
    """Raise this process's limit of open descriptors as far as it may, to _MOST_DESCRIPTORS.

    The usual soft limit of 1,024 suits programs that use select(2), and idle strangers would use it
    up. The children of this process inherit the limit: do not call this where scripts are started.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft not in (resource.RLIM_INFINITY, may) and soft < may:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (may, hard))
