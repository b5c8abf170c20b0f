"""Finds this machine's interfaces and addresses, and checks that an address leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from elastic.errors import ConfigurationError, TransientError
from elastic.runtime.off_loop import off_loop
from elastic.timeouts import timeout

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_ELSEWHERE = "192.0.2.1"  # RFC 5737: has no host; its route is that of any remote address


def interface_of(host: str) -> str | None:
    """Return the interface of this machine with the address of `host`, or None (netdevice(7))."""
    with contextlib.suppress(OSError, ValueError):
        for *_, address in socket.getaddrinfo(host, None):
            found = _interface_with(ipaddress.ip_address(str(address[0]).partition("%")[0]))
            if found is not None:
                return found
    return None


def is_own(host: str) -> bool:
    """Return whether `host` is this machine's name, or one of its addresses: only to these can a
    socket be bound."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, *_, target in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(target)
                return True
    return host == socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`. Raises OSError if there is none.

    This sends no packet: connecting a datagram socket only chooses the route.
    """
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def reachable_address() -> str:
    """Return the address that others can likely reach; the host name if only loopback exists."""
    with contextlib.suppress(OSError):
        return address_towards(_ELSEWHERE, 9)
    found = (str(address) for _, address in _ipv4_addresses() if not address.is_loopback)
    return next(found, socket.gethostname())


def listen_as(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Listen at the node's address `host`, or at all addresses of this machine if it is a name,
    which may stand for another address on other machines than here, or if it is an address that is
    translated on its way. Raises OSError."""
    with contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.inet_pton(family, host)
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=backlog)


def _interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if address.is_loopback:
        return "lo"
    if address.version == 6:
        return _ipv6_interface_with(address)
    return next((name for name, found in _ipv4_addresses() if found == address), None)


def _ipv4_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Yield the name and first address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                yield name, ipaddress.IPv4Address(answer[20:24])


def _ipv6_interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    for line in _IPV6_ADDRESSES.read_text().splitlines():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == address.packed:
            return name
    return None


_RESOLVE_S = 3.0
_CONNECT_S = 3.0
_NO_NETWORK = (errno.ENETUNREACH, errno.ENETDOWN)
_NAME_SERVERS_SILENT = (socket.EAI_AGAIN,)


async def require_own_address(host: str) -> None:
    """Check that a connection to `host`, a name or an address, reaches a socket of this process.

    Raises ConfigurationError if the name does not exist or leads elsewhere. Raises TransientError
    if no name server answers or there is no network yet. It takes some seconds at most, also if
    name servers are silent.
    """
    reasons: list[str] = []
    for family, found in await _resolved(host):
        try:
            async with timeout(_CONNECT_S):
                is_here = await _is_here(family, found)
            if is_here:
                return
            reasons.append(f"{found}: something else answers there")
        except asyncio.TimeoutError:
            reasons.append(f"{found}: no answer within {_CONNECT_S:g} s")
        except OSError as error:
            if error.errno in _NO_NETWORK:
                raise TransientError(f"{found}: {os.strerror(error.errno)}") from error
            reasons.append(f"{found}: {os.strerror(error.errno) if error.errno else error}")
    raise ConfigurationError(f"this machine cannot be reached there ({'; '.join(reasons)})")


async def _resolved(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of `host`. A thread that resolves for too long is abandoned."""
    resolve = functools.partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        async with timeout(_RESOLVE_S):
            found = await off_loop(resolve)
    except asyncio.TimeoutError:
        raise TransientError(f"no name server answers within {_RESOLVE_S:g} s") from None
    except socket.gaierror as error:
        if error.errno in _NAME_SERVERS_SILENT:
            raise TransientError(str(error.strerror)) from error
        raise ConfigurationError(f"it does not resolve ({error.strerror})") from error
    except UnicodeError as error:  # labels of a name have 1 to 63 characters
        raise ConfigurationError(f"it is not a valid host name ({error})") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


async def _is_here(family: socket.AddressFamily, address: str) -> bool:
    """Return whether a socket of this process receives what is sent to `address`."""
    word, heard = secrets.token_bytes(16), asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if await reader.readexactly(len(word)) == word:
                heard.set()
                writer.write(word)
        writer.close()

    with socket.create_server(("", 0), family=family) as listener:
        server = await asyncio.start_server(listen, sock=listener)
        try:
            port = listener.getsockname()[1]
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(word)
                with contextlib.suppress(ConnectionError):
                    await reader.read(1)
            finally:
                writer.close()
        finally:
            server.close()
    return heard.is_set()
