"""Whether this process can listen at an address, found by trying it, so that it can say why not.

gRPC says only that it cannot.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
from typing import Any

from elastic.errors import ConfigurationError, TransientError
from elastic.runtime.off_loop import off_loop

_RESOLVE_S = 5.0
_ADVICE = "choose another with --listen HOST:PORT, or :PORT for all interfaces"


async def require_listenable(address: str) -> None:
    """Returns if a socket can be bound to HOST:PORT.

    Raises ConfigurationError that says what is wrong with the address, and TransientError where no
    name server tells what the host is.
    """
    host, _, port = address.rpartition(":")
    look = functools.partial(_problems, host.strip("[]"), int(port))
    try:
        problems = await asyncio.wait_for(off_loop(look), _RESOLVE_S)
    except asyncio.TimeoutError:
        raise TransientError(
            f"can not listen at {address}: no name server answers within {_RESOLVE_S:g} s; try "
            "again, or give an address in place of the name"
        ) from None
    except socket.gaierror as error:
        kind = TransientError if error.errno == socket.EAI_AGAIN else ConfigurationError
        raise kind(
            f"can not listen at {address}: the host does not resolve ({error.strerror}); {_ADVICE}"
        ) from error
    except UnicodeError as error:
        raise ConfigurationError(
            f"can not listen at {address}: that is no name of a host ({error}); {_ADVICE}"
        ) from error
    if problems:
        raise ConfigurationError(f"can not listen at {address}: {problems[0]}; {_ADVICE}")


def _problems(host: str, port: int) -> list[str]:
    """Those of every address that the host has; none if one can be had."""
    problems: list[str] = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, target in found:
        problem = _problem(family, kind, protocol, target)
        if problem is None:
            return []
        problems.append(problem)
    return problems


def _problem(family: int, kind: int, protocol: int, target: Any) -> str | None:
    try:
        with socket.socket(family, kind, protocol) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            if family == socket.AF_INET6:
                trying.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            trying.bind(target)
            trying.listen(1)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT and target[0] == "::":
            return _problem(socket.AF_INET, kind, protocol, ("0.0.0.0", target[1]))
        return _words(error, str(target[0]), int(target[1]))
    return None


def _words(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use by another process"
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"{host} is no address of this machine"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not use port {port}, as none below 1024 (CAP_NET_BIND_SERVICE)"
    return os.strerror(error.errno) if error.errno else str(error)
