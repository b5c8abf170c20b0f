"""A socket that listens for HTTP, or what is wrong with the address."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from elastic.errors import ConfigurationError

_BACKLOG = 1024  # connections that nobody has looked at: they cost the kernel little


def listen_at(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT; without a host, on every interface. Blocks on names.

    Raises ConfigurationError that names the address and what is wrong with it.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(
            host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise _refusal(address, f"the host does not resolve ({error})") from error
    problems: list[str] = []
    for family, kind, protocol, _, target in found:
        try:
            return _listening(family, kind, protocol, target)
        except OSError as error:
            problems.append(_words(error, host, int(port)))
    raise _refusal(address, problems[0])


def _listening(family: int, kind: int, protocol: int, target: Any) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
        return f"{host} is no address of this machine"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not use port {port}"
    return os.strerror(error.errno) if error.errno else str(error)


def _refusal(address: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"can not serve HTTP at {address}: {why}; choose another with --http-address HOST:PORT"
    )


def address_of(listener: socket.socket) -> str:
    """Where it listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
