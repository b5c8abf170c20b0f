"""Which network interface has an address."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_of(host: str) -> str | None:
    """The interface of this machine that has the address of `host` (netdevice(7)), or None."""
    with contextlib.suppress(OSError, ValueError):
        for *_, address in socket.getaddrinfo(host, None):
            found = _interface_with(ipaddress.ip_address(str(address[0]).partition("%")[0]))
            if found is not None:
                return found
    return None


def _interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if address.is_loopback:
        return "lo"
    if address.version == 6:
        return _ipv6_interface_with(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if answer[20:24] == address.packed:
                    return name
    return None


def _ipv6_interface_with(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    for line in _IPV6_ADDRESSES.read_text().splitlines():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == address.packed:
            return name
    return None
