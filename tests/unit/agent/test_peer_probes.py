"""Connections that a node makes to find out which workers it reaches."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from elastic.agent.peer_probes import open_probe_port, port_of, unreached


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def endpoint(of: socket.socket) -> str:
    return f"127.0.0.1:{of.getsockname()[1]}"


def test_a_listener_that_accepts_nothing_is_reached(listener: socket.socket) -> None:
    assert unreached({"a": endpoint(listener)}, 5.0) == {}


def test_a_closed_port_and_a_bad_address_are_told_apart(listener: socket.socket) -> None:
    closed = endpoint(listener)
    listener.close()
    found = unreached({"a": closed, "b": "127.0.0.1:no-port", "c": ":"}, 5.0)
    assert found["a"] == "Connection refused"
    assert found.keys() == {"a", "b", "c"}


def test_one_that_does_not_answer_takes_the_whole_time_and_hides_no_other() -> None:
    with socket.socket() as full, socket.create_server(("127.0.0.1", 0)) as open_:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fill = [socket.socket() for _ in range(4)]  # its queue is full: further ones are dropped
        for each in fill:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        began = time.monotonic()
        found = unreached({"full": endpoint(full), "open": endpoint(open_)}, 0.2)
        assert found == {"full": "no answer"}
        assert time.monotonic() - began >= 0.2
        for each in fill:
            each.close()


async def test_an_agents_probe_port_takes_any_number_of_connections() -> None:
    server = await open_probe_port("a-name")  # may be any of this machine's addresses
    assert server is not None
    async with server:
        for address in ("127.0.0.1", "127.0.0.2"):
            endpoints = {at: f"{address}:{port_of(server)}" for at in range(300)}
            assert await asyncio.to_thread(unreached, endpoints, 5.0) == {}
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        assert await asyncio.wait_for(reader.read(), 30.0) == b""
        writer.close()
    assert port_of(None) == 0


async def test_an_agents_probe_port_is_at_the_nodes_address_only() -> None:
    server = await open_probe_port("127.0.0.2")
    assert server is not None
    async with server:
        reader, writer = await asyncio.open_connection("127.0.0.2", port_of(server))
        assert await asyncio.wait_for(reader.read(), 30.0) == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port_of(server))
