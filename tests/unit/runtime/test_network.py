"""The interface that has an address, on this machine as it is."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from elastic.runtime import network
from elastic.runtime.network import interface_of


def test_loopback() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.53"):
        assert interface_of(host) == "lo"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_loopback_by_ipv6() -> None:
    assert interface_of("::1") == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "", "\0"])
def test_addresses_of_nobody_here(host: str) -> None:
    if host:
        assert interface_of(host) is None
    else:
        assert interface_of(host) in (None, "lo")


def _own_ipv4() -> str | None:
    """The address from which packets would go to elsewhere; none are sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_the_address_towards_others() -> None:
    own = _own_ipv4()
    if own is None or own.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    name = interface_of(own)
    assert name in {name for _, name in socket.if_nameindex()}
    assert name != "lo"


def test_the_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the way to elsewhere, else one of an interface, else the name."""
    own, ways = _own_ipv4(), []

    def no_way(host: str, port: int) -> str:
        ways.append((host, port))
        raise OSError

    if own is not None:
        assert network.address_for_others() == own
    monkeypatch.setattr(network, "address_towards", no_way)
    found = ["127.0.0.1", "10.0.0.7", "10.0.0.8"]
    addresses = [(f"eth{n}", ipaddress.IPv4Address(one)) for n, one in enumerate(found)]
    monkeypatch.setattr(network, "_ipv4_addresses", lambda: iter(addresses))
    assert network.address_for_others() == "10.0.0.7"
    del addresses[1:]
    assert network.address_for_others() == socket.gethostname()
    assert ways


def test_ipv6_addresses_are_those_that_the_kernel_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in proc(5): the address in hexadecimal first, the interface last."""
    listing = tmp_path / "if_inet6"
    listing.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000042acfffe110002 2b 40 20 80     eth0\n"
        "20010db8000000000000000000000007 2b 40 00 80     eth1\n"
    )
    monkeypatch.setattr("elastic.runtime.network._IPV6_ADDRESSES", listing)
    assert interface_of("2001:db8::7") == "eth1"
    assert interface_of("2001:db8::8") is None
    listing.unlink()
    assert interface_of("2001:db8::7") is None
