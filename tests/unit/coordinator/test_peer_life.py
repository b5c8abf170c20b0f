"""A peer's process counts as gone when its kernel says so, and only then."""

from __future__ import annotations

import asyncio
import time

import pytest

from elastic.coordinator import leadership
from elastic.coordinator.leadership import wait_until_gone
from tests.etcd_cluster import free_ports


class Peer:
    """A server that listens until `end`."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.callers: list[asyncio.StreamWriter] = []
        self.came = asyncio.Event()

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.write(b"a server's first words")
        self.callers.append(writer)
        self.came.set()

    def hang_up(self) -> None:
        self.came.clear()
        while self.callers:
            self.callers.pop().close()

    def end(self) -> None:
        self.server.close()
        self.hang_up()


async def test_a_peer_that_no_longer_listens_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "_AGAIN_S", 0.01)
    peer = Peer()
    await peer.start()
    watching = asyncio.create_task(wait_until_gone(f"127.0.0.1:{peer.port}"))
    for _ in range(3):  # the peer closes connections that are silent
        await peer.came.wait()
        peer.hang_up()
    await peer.came.wait()
    assert not watching.done()
    peer.end()
    await watching


async def test_a_peer_that_hangs_up_at_once_is_not_called_without_a_pause() -> None:
    """A proxy does that whose server is gone."""
    peer = Peer()
    await peer.start()
    watching = asyncio.create_task(wait_until_gone(f"127.0.0.1:{peer.port}"))
    for _ in range(8):  # the pauses grow
        await peer.came.wait()
        peer.hang_up()
    began, calls = time.monotonic(), 3
    for _ in range(calls):
        await peer.came.wait()
        peer.hang_up()
    assert time.monotonic() - began >= (calls - 1) * leadership._AGAIN_S
    watching.cancel()
    peer.end()


@pytest.mark.timeout(30.0)
@pytest.mark.parametrize("lasted", [False, True])
async def test_a_peer_that_accepts_once_more_as_it_ends_is_gone_soon(
    lasted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes the sockets of a dead process in turn, the listening one perhaps last."""
    monkeypatch.setattr(leadership, "_AGAIN_S", 3600.0)
    peer = Peer()
    await peer.start()
    watching = asyncio.create_task(wait_until_gone(f"127.0.0.1:{peer.port}"))
    await peer.came.wait()
    if lasted:
        monkeypatch.setattr(leadership, "_AGAIN_S", 0.0)
    peer.hang_up()
    await peer.came.wait()
    monkeypatch.setattr(leadership, "_AGAIN_S", 3600.0)
    peer.end()
    await watching


async def test_a_peer_that_has_ended_as_it_accepted_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [ConnectionResetError(), ConnectionRefusedError()]

    async def connect(_address: str) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(leadership, "_connect", connect)
    await wait_until_gone("peer:1")
    assert not answers


async def test_a_peer_is_watched_on_after_there_was_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leadership, "_AGAIN_S", 0.01)
    answers = [RuntimeError("can't start new thread"), ConnectionResetError()]

    async def connect(_address: str) -> None:
        raise answers.pop(0) if answers else ConnectionRefusedError

    monkeypatch.setattr(leadership, "_connect", connect)
    await wait_until_gone("peer:1")
    assert not answers


async def test_a_peer_that_was_never_reached_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "_AGAIN_S", 0.01)
    peer = Peer()
    for address in (f"127.0.0.1:{peer.port}", "no-such-host.invalid:1", "nonsense", ""):
        watching = asyncio.create_task(wait_until_gone(address))
        await asyncio.sleep(0.1)
        assert not watching.done()
        watching.cancel()
    watching = asyncio.create_task(wait_until_gone(f"127.0.0.1:{peer.port}"))
    await asyncio.sleep(0.05)
    await peer.start()
    await peer.came.wait()
    peer.end()
    await watching


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.timeout(5.0)
async def test_a_cancellation_that_comes_as_an_attempt_ends_is_not_lost(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12 asyncio.wait_for loses it, and the canceller would wait for ever."""
    attempt: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(_address: str) -> None:
        await attempt

    monkeypatch.setattr(leadership, "_connect", connect)
    waiting = asyncio.create_task(wait_until_gone("peer:1"))
    await asyncio.sleep(0.01)
    attempt.set_exception(OSError("no such host"))
    for _ in range(turns):  # of the event loop
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
