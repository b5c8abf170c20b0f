"""`connections` finds only connected TCP sockets, and `shut_down` cuts only those it is given."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from elastic.worker.group.gloo_sockets import connections, shut_down

Pair = tuple[socket.socket, socket.socket]


class Network:
    """Makes sockets that are closed when the test ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def tcp(self, host: str = "127.0.0.1") -> Pair:
        """Return both ends of a new connection."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = self._stack.enter_context(socket.create_server((host, 0), family=family))
        client = self._stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        server = self._stack.enter_context(listener.accept()[0])
        return client, server

    def others(self) -> None:
        """Make sockets that are not TCP connections."""
        for sock in (
            *socket.socketpair(),
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(),
            socket.socket(type=socket.SOCK_DGRAM),
        ):
            self._stack.enter_context(sock)


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        yield Network(stack)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_new_connections_are_found_and_nothing_else(network: Network, host: str) -> None:
    if host == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    network.tcp()
    before = connections()
    network.others()
    assert connections() == before
    client, server = network.tcp(host)
    new = connections() - before
    assert {c.descriptor for c in new} == {client.fileno(), server.fileno()}
    assert {c.local_port for c in new} == {s.getsockname()[1] for s in (client, server)}


def test_looking_for_connections_closes_none(network: Network) -> None:
    client, server = network.tcp()
    connections()
    client.sendall(b"x")
    assert server.recv(1) == b"x"


def test_shut_down_frees_a_blocked_thread(network: Network) -> None:
    before = connections()
    client, server = network.tcp()
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(client.recv(1)))
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive()
    shut_down(connections() - before)
    thread.join(1.0)
    assert not thread.is_alive()
    assert received == [b""]
    with pytest.raises(BrokenPipeError):
        server.sendall(b"x")


def test_shutting_only_the_sending_side_leaves_receiving_open(network: Network) -> None:
    before = connections()
    client, server = network.tcp()
    mine = [c for c in connections() - before if c.descriptor == client.fileno()]
    client.sendall(b"before")
    shut_down(mine, socket.SHUT_WR)
    assert server.recv(10) == b"before"
    assert server.recv(10) == b""
    server.sendall(b"after")
    assert client.recv(10) == b"after"


def test_a_descriptor_that_another_socket_has_taken_over_is_not_shut(network: Network) -> None:
    before = connections()
    old, _ = network.tcp()
    doomed = connections() - before
    new, peer = network.tcp()
    os.dup2(new.fileno(), old.fileno())  # the same number, another socket
    shut_down([c for c in doomed if c.descriptor == old.fileno()])
    new.sendall(b"x")
    assert peer.recv(1) == b"x"


def test_closed_connections_are_skipped(network: Network) -> None:
    before = connections()
    client, server = network.tcp()
    doomed = connections() - before
    client.close()
    server.close()
    shut_down(doomed)


def test_the_scripts_default_timeout_does_not_make_sockets_non_blocking(network: Network) -> None:
    client, server = network.tcp()
    socket.setdefaulttimeout(5.0)
    try:
        found = {c for c in connections() if c.descriptor in (client.fileno(), server.fileno())}
        assert os.get_blocking(client.fileno())
        shut_down(found)
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(server.fileno())
    assert client.recv(1) == server.recv(1) == b""
