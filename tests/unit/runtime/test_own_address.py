"""An address is this machine's if what is said there is heard here."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from typing import Any

import pytest

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.runtime import own_address
from elastic.runtime.own_address import require_own
from tests.contract.conftest import within_deadline


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_address, "_RESOLVE_S", 0.2)
    monkeypatch.setattr(own_address, "_CONNECT_S", 0.5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_of_this_machine(host: str) -> None:
    within_deadline(require_own(host))


def resolving_to(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0)) for found in answer]

    monkeypatch.setattr(own_address.socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            ConfigurationError,
            r"does not resolve \(Name or service not known\)",
        ),
        (socket.gaierror(socket.EAI_AGAIN, "Try again"), TransientError, "Try again"),
        (UnicodeError("label too long"), ConfigurationError, "no name of a host"),
    ],
)
def test_a_name_without_an_address(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, kind: type[ElasticError], says: str
) -> None:
    resolving_to(monkeypatch, answer)
    with pytest.raises(kind, match=says):
        within_deadline(require_own("h"))


def test_one_of_several_addresses_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_here(_: Any, address: str) -> bool:
        if address == "192.0.2.1":
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return True

    resolving_to(monkeypatch, ["192.0.2.1", "127.0.0.1"])
    monkeypatch.setattr(own_address, "_is_here", is_here)
    within_deadline(require_own("h"))


@pytest.mark.parametrize(
    ("outcome", "kind", "says"),
    [
        (OSError(errno.ECONNREFUSED, ""), ConfigurationError, "192.0.2.1: Connection refused"),
        (OSError(errno.ENETUNREACH, ""), TransientError, "192.0.2.1: Network is unreachable"),
        (asyncio.TimeoutError(), ConfigurationError, "192.0.2.1: no answer within"),
        (False, ConfigurationError, "192.0.2.1: something else answers there"),
    ],
)
def test_an_address_of_another_machine(
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
    monkeypatch.setattr(own_address, "_is_here", is_here)
    with pytest.raises(kind, match=says):
        within_deadline(require_own("h"))


def test_name_servers_that_are_silent_do_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(own_address.socket, "getaddrinfo", lambda *_, **__: answered.wait(10))

    async def check() -> None:
        ticks, began_at = 0, time.monotonic()
        looking = asyncio.ensure_future(require_own("h"))
        while not looking.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(TransientError, match="no name server answers"):
            looking.result()
        assert ticks >= 3
        assert time.monotonic() - began_at < 5

    try:
        within_deadline(check())
    finally:
        answered.set()
