"""Whether the process behind an address has ended, as its kernel tells."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket

from elastic.runtime.off_loop import off_loop
from elastic.timeouts import timeout

_CONNECT_S = 2.0
_AGAIN_S = 0.5


async def until_gone(address: str) -> None:
    """Return when a process that has listened at `address` (host:port) does so no more.

    The kernel closes what a dead process had open, and refuses new connections to it. A host that
    is silent, or cannot be reached, tells nothing: then this waits on, and also where nobody could
    ever be reached from here.
    """
    was_there = False
    while True:
        try:
            async with timeout(_CONNECT_S):
                reader, writer = await _connect(address)
        except ConnectionRefusedError:
            if was_there:
                return
        except (OSError, asyncio.TimeoutError, ValueError):
            pass
        else:
            was_there = True
            try:
                with contextlib.suppress(OSError):
                    while await reader.read(4096):
                        pass  # what a server says at once
            finally:
                writer.close()
            continue  # gone, or tired of one who says nothing: to be tried at once
        await asyncio.sleep(_AGAIN_S)


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The name is resolved by a thread that nobody waits for, since that may take long."""
    host, _, port = address.rpartition(":")
    resolve = functools.partial(
        socket.getaddrinfo, host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    (_, _, _, _, (found, *_)), *_ = await off_loop(resolve)
    return await asyncio.open_connection(str(found), int(port))
