"""Which network interface has an address, and which address this machine has for others."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody's; it takes the route of any address far away


def interface_of(host: str) -> str | None:
    """The interface of this machine that has the address of `host` (netdevice(7)), or None."""
    with contextlib.suppress(OSError, ValueError):
        for *_, address in socket.getaddrinfo(host, None):
            found = _interface_with(ipaddress.ip_address(str(address[0]).partition("%")[0]))
            if found is not None:
                return found
    return None


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way there. Raises OSError if there is none.

    No packet is sent: connecting a datagram socket only chooses the route.
    """
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_for_others() -> str:
    """The one that others are likely to reach; this machine's name if it has none but loopback."""
    with contextlib.suppress(OSError):
        return address_towards(_ELSEWHERE, 9)
    found = (str(address) for _, address in _ipv4_addresses() if not address.is_loopback)
    return next(found, socket.gethostname())


def _interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if address.is_loopback:
        return "lo"
    if address.version == 6:
        return _ipv6_interface_with(address)
    return next((name for name, found in _ipv4_addresses() if found == address), None)


def _ipv4_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """The first of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                yield name, ipaddress.IPv4Address(answer[20:24])


def _ipv6_interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    for line in _IPV6_ADDRESSES.read_text().splitlines():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == address.packed:
            return name
    return None
