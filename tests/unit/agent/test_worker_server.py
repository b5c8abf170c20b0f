"""The workers' socket: only for this user, only for workers that were spawned here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elastic.agent import worker_server
from elastic.agent.worker_server import WorkerServer
from elastic.rpc.framing import MAX_FRAME_BYTES, encode, read_message
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb


class Place:
    """A server that expects the workers "a" and "b"; `heard` is what they said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._peers: list[Peer] = []
        self.heard: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        self.server = WorkerServer(
            path,
            expected=lambda worker: worker in ("a", "b"),
            on_message=lambda w, m: self.heard.put_nowait((w, m.WhichOneof("kind"))),
        )

    async def connect(self, *, hello: str | None = None) -> Peer:
        peer = Peer(*await asyncio.open_unix_connection(self.path))
        self._peers.append(peer)
        if hello is not None:
            peer.send(hello=pb.Hello(worker=hello, pid=1))
        return peer

    async def close(self) -> None:
        await self.server.close()
        for peer in self._peers:
            peer.writer.close()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()


class Peer:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, **kind: object) -> None:
        self.writer.write(encode(pb.WorkerMessage(**kind)))  # type: ignore[arg-type]

    async def receive(self) -> pb.WorkerCommand | None:
        return await read_message(self._reader, pb.WorkerCommand)


def with_place(tmp_path: Path, check: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place(tmp_path / "agent.sock")
        await place.server.start()
        try:
            await asyncio.wait_for(check(place), 10)
        finally:
            await place.close()

    asyncio.run(main())


STATUS = job_pb2.WorkerStatus(worker="a")


def test_only_this_user_can_connect(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
        assert stat.S_ISSOCK(place.path.stat().st_mode)

    before = os.umask(0o022)
    try:
        with_place(tmp_path, check)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_workers_are_heard_and_told(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        a, b = await place.connect(hello="a"), await place.connect(hello="b")
        for worker, peer in (("a", a), ("b", b)):
            peer.send(status=STATUS)
            assert await place.heard.get() == (worker, "status")
        place.server.send("a", assignment=pb.Assignment(slot=3))
        place.server.send("nobody", dismiss=pb.Dismiss())
        place.server.broadcast(ledger_stored=pb.LedgerStored(committed=5))
        first = await a.receive()
        assert first is not None
        assert first.assignment.slot == 3
        for peer in (a, b):
            stored = await peer.receive()
            assert stored is not None
            assert stored.ledger_stored.committed == 5

    with_place(tmp_path, check)


@pytest.mark.parametrize(
    "frame",
    [
        encode(pb.WorkerMessage(hello=pb.Hello(worker="stranger"))),
        encode(pb.WorkerMessage(status=STATUS)),
        struct.pack("!I", MAX_FRAME_BYTES + 1),
        struct.pack("!I", 4) + b"\xff\xff\xff\xff",
    ],
    ids=["stranger", "no hello", "oversized", "garbage"],
)
def test_others_are_turned_away_and_nobody_minds(tmp_path: Path, frame: bytes) -> None:
    async def check(place: Place) -> None:
        a = await place.connect(hello="a")
        bad = await place.connect()
        bad.writer.write(frame)
        bad.send(status=STATUS)
        assert await bad.receive() is None
        a.send(status=STATUS)
        assert await place.heard.get() == ("a", "status")
        assert place.heard.empty()

    with_place(tmp_path, check)


def test_garbage_of_a_worker_closes_its_connection(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        a = await place.connect(hello="a")
        a.writer.write(struct.pack("!I", MAX_FRAME_BYTES + 1))
        assert await a.receive() is None
        again = await place.connect(hello="a")
        again.send(status=STATUS)
        assert await place.heard.get() == ("a", "status")

    with_place(tmp_path, check)


def test_whoever_says_nothing_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_HELLO_TIMEOUT_S", 0.02)

    async def check(place: Place) -> None:
        silent = await place.connect()
        assert await silent.receive() is None

    with_place(tmp_path, check)


def test_the_end_of_an_older_connection_does_not_end_the_newer(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        old = await place.connect(hello="a")
        old.send(status=STATUS)
        await place.heard.get()
        new = await place.connect(hello="a")
        new.send(status=STATUS)
        await place.heard.get()
        old.writer.close()
        assert await old.receive() is None
        await asyncio.sleep(0.01)
        place.server.send("a", dismiss=pb.Dismiss())
        assert await new.receive() == pb.WorkerCommand(dismiss=pb.Dismiss())

    with_place(tmp_path, check)


def test_closing_ends_every_connection(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        a = await place.connect(hello="a")
        a.send(status=STATUS)
        await place.heard.get()
        await place.server.close()
        assert await a.receive() is None
        with pytest.raises(ConnectionRefusedError):
            await place.connect()

    with_place(tmp_path, check)
