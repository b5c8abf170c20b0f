"""The error says in words why a process cannot listen at an address."""

from __future__ import annotations

import errno
import resource
import socket
import subprocess
import sys
from typing import Any

import pytest

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.runtime import listening
from elastic.runtime.listening import allow_many_connections, require_listenable
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


@pytest.mark.parametrize("hard", [2048, 512])
def test_the_limit_of_descriptors_is_raised_as_far_as_allowed(hard: int) -> None:
    code = (
        "import resource; from elastic.runtime.listening import allow_many_connections; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (512, {hard})); allow_many_connections(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(hard), str(hard)], done.stderr


def test_a_high_limit_of_descriptors_is_kept_and_used_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"soft": 512, "hard": resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits.values()))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(soft=new[0]))
    allow_many_connections()
    assert limits["soft"] == 65536
    limits["soft"] = 100_000
    allow_many_connections()
    assert limits["soft"] == 100_000
