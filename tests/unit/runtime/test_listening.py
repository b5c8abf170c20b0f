"""The error says in words why a process cannot listen at an address."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.runtime import listening
from elastic.runtime.listening import require_listenable
from tests.etcd_cluster import free_ports


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])
async def test_a_free_port_is_accepted_and_one_in_use_is_refused(host: str) -> None:
    (port,) = free_ports(1)
    await require_listenable(f"{host}:{port}")
    with (
        socket.create_server(("0.0.0.0", port)),
        pytest.raises(
            ConfigurationError, match=f"port {port} is in use by another process; choose .*--listen"
        ),
    ):
        await require_listenable(f"{'127.0.0.1' if host == 'localhost' else host}:{port}")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, r"this user may not use port 80, nor any port below 1024"),
        (errno.EADDRNOTAVAIL, "10.0.0.1 is not an address of this machine"),
        (errno.ENOBUFS, "No buffer space"),
    ],
)
async def test_an_error_of_bind_is_explained(
    monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def bind(*_: Any) -> None:
        raise OSError(number, "")

    monkeypatch.setattr(listening.socket.socket, "bind", bind)
    with pytest.raises(ConfigurationError, match=f"10.0.0.1:80: {says}"):
        await require_listenable("10.0.0.1:80")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(socket.EAI_NONAME, ConfigurationError), (socket.EAI_AGAIN, TransientError)],
)
async def test_a_host_that_does_not_resolve_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[ElasticError]
) -> None:
    def resolve(*_: Any, **__: Any) -> None:
        raise socket.gaierror(number, "why")

    monkeypatch.setattr(listening.socket, "getaddrinfo", resolve)
    with pytest.raises(kind, match=r"h:1: the host does not resolve \(why\)"):
        await require_listenable("h:1")
