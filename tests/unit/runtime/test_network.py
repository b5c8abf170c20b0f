"""The interface that has an address is found on this machine as it is, and an address belongs to
this machine if a connection to it arrives here."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.runtime import network
from elastic.runtime.network import interface_of, require_own_address


def test_loopback_addresses_belong_to_lo() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.53"):
        assert interface_of(host) == "lo"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_the_ipv6_loopback_address_belongs_to_lo() -> None:
    assert interface_of("::1") == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid", "", "\0"])
def test_a_foreign_address_has_no_interface(host: str) -> None:
    if host:
        assert interface_of(host) is None
    else:
        assert interface_of(host) in (None, "lo")


def _own_ipv4() -> str | None:
    """The source address of packets to other networks, None without a route. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_the_address_towards_others_has_an_interface_other_than_lo() -> None:
    own = _own_ipv4()
    if own is None or own.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    name = interface_of(own)
    assert name in {name for _, name in socket.if_nameindex()}
    assert name != "lo"


def test_address_for_others_tries_route_interface_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    own, ways = _own_ipv4(), []

    def no_way(host: str, port: int) -> str:
        ways.append((host, port))
        raise OSError

    if own is not None:
        assert network.reachable_address() == own
    monkeypatch.setattr(network, "address_towards", no_way)
    found = ["127.0.0.1", "10.0.0.7", "10.0.0.8"]
    addresses = [(f"eth{n}", ipaddress.IPv4Address(one)) for n, one in enumerate(found)]
    monkeypatch.setattr(network, "_ipv4_addresses", lambda: iter(addresses))
    assert network.reachable_address() == "10.0.0.7"
    del addresses[1:]
    assert network.reachable_address() == socket.gethostname()
    assert ways


def test_ipv6_addresses_are_those_that_the_kernel_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format is that of proc(5): the address in hexadecimal first, the interface last."""
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


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_RESOLVE_S", 0.2)
    monkeypatch.setattr(network, "_CONNECT_S", 0.5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_of_this_machine_is_accepted(host: str) -> None:
    await require_own_address(host)


def resolving_to(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0)) for found in answer]

    monkeypatch.setattr(network.socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            ConfigurationError,
            r"does not resolve \(Name or service not known\)",
        ),
        (socket.gaierror(socket.EAI_AGAIN, "Try again"), TransientError, "Try again"),
        (UnicodeError("label too long"), ConfigurationError, "not a valid host name"),
    ],
)
async def test_a_name_without_an_address_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, kind: type[ElasticError], says: str
) -> None:
    resolving_to(monkeypatch, answer)
    with pytest.raises(kind, match=says):
        await require_own_address("h")


async def test_one_of_a_names_addresses_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def is_here(_: Any, address: str) -> bool:
        if address == "192.0.2.1":
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return True

    resolving_to(monkeypatch, ["192.0.2.1", "127.0.0.1"])
    monkeypatch.setattr(network, "_is_here", is_here)
    await require_own_address("h")


@pytest.mark.parametrize(
    ("outcome", "kind", "says"),
    [
        (OSError(errno.ECONNREFUSED, ""), ConfigurationError, "192.0.2.1: Connection refused"),
        (OSError(errno.ENETUNREACH, ""), TransientError, "192.0.2.1: Network is unreachable"),
        (asyncio.TimeoutError(), ConfigurationError, "192.0.2.1: no answer within"),
        (False, ConfigurationError, "192.0.2.1: something else answers there"),
    ],
)
async def test_an_address_of_another_machine_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    outcome: Exception | bool,
    kind: type[ElasticError],
    says: str,
) -> None:
    async def is_here(*_: Any) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    resolving_to(monkeypatch, ["192.0.2.1"])
    monkeypatch.setattr(network, "_is_here", is_here)
    with pytest.raises(kind, match=says):
        await require_own_address("h")


async def test_silent_name_servers_do_not_block_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: answered.wait(10))

    try:
        ticks, began_at = 0, time.monotonic()
        looking = asyncio.ensure_future(require_own_address("h"))
        while not looking.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(TransientError, match="no name server answers"):
            looking.result()
        assert ticks >= 3
        assert time.monotonic() - began_at < 5
    finally:
        answered.set()
