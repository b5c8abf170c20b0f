"""The workers' socket is only for this user and for workers that were spawned here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from elastic.agent import worker_server
from elastic.agent.worker_server import WorkerServer
from elastic.rpc.framing import MAX_FRAME_BYTES, encode, read_message
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb


class Place:
    """A server that expects the workers "a" and "b"; `heard` has what they said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._peers: list[Peer] = []
        self.heard: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        self.reports: asyncio.Queue[str] = asyncio.Queue()
        self.errors: asyncio.Queue[Exception] = asyncio.Queue()
        self.raises: Exception | None = None
        self.workers = {"a", "b"}
        self.known = asyncio.Event()
        self.known.set()
        self.server = WorkerServer(
            path,
            expected=lambda worker: worker in self.workers,
            on_message=self._hear,
            report=self._report,
            on_error=self.errors.put_nowait,
            known=self.known,
        )

    def _hear(self, worker: str, message: pb.WorkerMessage) -> None:
        if self.raises is not None:
            raise self.raises
        self.heard.put_nowait((worker, message.WhichOneof("kind")))

    def _report(self, name: str, /, *, path: str, reason: str) -> None:
        assert (name, path) == ("connection_refused", str(self.path))
        self.reports.put_nowait(reason)

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


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path / "agent.sock")
    await place.server.start()
    yield place
    await place.close()


STATUS = job_pb2.WorkerStatus(worker="a")


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o022)
    yield 0o022
    os.umask(before)


async def test_only_this_user_can_connect(umask: int, place: Place) -> None:
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(place.path.stat().st_mode)
    assert os.umask(umask) == umask


async def test_messages_of_workers_are_heard_and_commands_reach_them(place: Place) -> None:
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


LONG_NAME = encode(pb.WorkerMessage(hello=pb.Hello(worker="a" * 100_000)))


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (encode(pb.WorkerMessage(hello=pb.Hello(worker="stranger"))), "claims to be 'stranger'"),
        (encode(pb.WorkerMessage(status=STATUS)), "claims to be ''"),
        (struct.pack("!I", MAX_FRAME_BYTES + 1), f"frame of {MAX_FRAME_BYTES + 1} bytes"),
        (LONG_NAME, "at most 4096 allowed"),
        (struct.pack("!I", 4) + b"\xff\xff\xff\xff", "not a WorkerMessage"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame of 1195725856 bytes"),
        (b"\x16\x03\x01\x02\x00\x01", "frame of 369295618 bytes"),
    ],
    ids=["stranger", "no hello", "oversized", "long name", "garbage", "http", "tls"],
)
async def test_strangers_are_refused_and_disturb_no_worker(
    place: Place, frame: bytes, why: str
) -> None:
    a = await place.connect(hello="a")
    bad = await place.connect()
    bad.writer.write(frame)
    bad.send(status=STATUS)
    assert await bad.receive() is None
    a.send(status=STATUS)
    assert await place.heard.get() == ("a", "status")
    assert place.heard.empty()
    reason = await place.reports.get()
    assert reason.startswith("an unknown peer: ")
    assert why in reason


async def test_a_worker_that_connects_before_it_is_known_waits(place: Place) -> None:
    """An agent that restarts knows a worker only when the zygote has told of it."""
    place.known.clear()
    peer, stranger = await place.connect(hello="c"), await place.connect(hello="stranger")
    peer.send(status=STATUS)
    await asyncio.sleep(0.05)
    assert place.reports.empty()
    place.workers.add("c")
    place.known.set()
    assert await place.heard.get() == ("c", "status")
    assert "claims to be 'stranger'" in await place.reports.get()
    assert await stranger.receive() is None


async def test_a_worker_that_is_not_known_in_time_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_HELLO_TIMEOUT_S", 0.05)
    place.known.clear()
    stranger = await place.connect(hello="stranger")
    assert "claims to be 'stranger'" in await place.reports.get()
    assert await stranger.receive() is None


async def test_garbage_of_a_worker_closes_its_connection(place: Place) -> None:
    a = await place.connect(hello="a")
    a.writer.write(struct.pack("!I", MAX_FRAME_BYTES + 1))
    assert await a.receive() is None
    assert (await place.reports.get()).startswith("worker a: frame of ")
    again = await place.connect(hello="a")
    again.send(status=STATUS)
    assert await place.heard.get() == ("a", "status")


async def test_a_peer_that_does_not_say_its_name_in_time_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_HELLO_TIMEOUT_S", 0.02)
    for said in (b"", struct.pack("!I", 20) + b"half"):
        silent = await place.connect()
        silent.writer.write(said)
        assert await silent.receive() is None
        assert "did not send its name within 0.02 s" in await place.reports.get()


@pytest.mark.parametrize("said", [b"", b"\0\0", struct.pack("!I", 20) + b"half"])
async def test_a_peer_that_leaves_at_once_disturbs_no_worker(place: Place, said: bytes) -> None:
    a = await place.connect(hello="a")
    gone = await place.connect()
    gone.writer.write(said)
    gone.writer.close()
    assert "disconnected before it sent its name" in await place.reports.get()
    a.send(status=STATUS)
    assert await place.heard.get() == ("a", "status")


async def test_many_silent_connections_keep_no_worker_out(place: Place) -> None:
    for _ in range(200):
        await place.connect()
    a = await place.connect(hello="a")
    a.send(status=STATUS)
    assert await place.heard.get() == ("a", "status")


async def test_a_worker_that_stops_in_the_middle_of_a_frame_holds_up_no_other(place: Place) -> None:
    a, b = await place.connect(hello="a"), await place.connect(hello="b")
    a.writer.write(struct.pack("!I", MAX_FRAME_BYTES) + b"half")
    b.send(status=STATUS)
    assert await place.heard.get() == ("b", "status")
    a.writer.close()
    assert await a.receive() is None
    assert place.reports.empty()  # the death of a worker is no refused connection


async def test_a_message_that_makes_no_sense_closes_its_workers_connection(place: Place) -> None:
    a = await place.connect(hello="a")
    place.raises = ValueError("17 is not a valid phase")
    a.send(status=STATUS)
    assert await a.receive() is None
    assert await place.reports.get() == "worker a: an invalid message: 17 is not a valid phase"
    assert place.errors.empty()


async def test_an_error_of_the_agent_itself_is_reported(place: Place) -> None:
    a = await place.connect(hello="a")
    place.raises = KeyError("a bug")
    a.send(status=STATUS)
    assert await place.errors.get() is place.raises


async def test_the_end_of_an_older_connection_does_not_end_the_newer(place: Place) -> None:
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


async def test_closing_ends_every_connection(place: Place) -> None:
    a = await place.connect(hello="a")
    a.send(status=STATUS)
    await place.heard.get()
    await place.server.close()
    assert await a.receive() is None
    with pytest.raises(ConnectionRefusedError):
        await place.connect()


async def test_closing_ends_connections_of_workers_that_are_not_known_yet(place: Place) -> None:
    place.known.clear()
    peer = await place.connect(hello="c")
    await asyncio.sleep(0.05)
    await place.server.close()
    assert await asyncio.wait_for(peer.receive(), 1.0) is None
    assert place.reports.empty()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "asyncio would log their cancellation"


async def test_what_all_are_told_reaches_workers_that_connect_later(place: Place) -> None:
    """A worker that got SIGTERM as well ends unless its agent says in time that the node leaves."""
    leaves = pb.WorkerCommand(node_leaves=pb.NodeLeaves())
    a = await place.connect(hello="a")
    a.send(status=STATUS)
    await place.heard.get()
    place.server.tell_all(node_leaves=pb.NodeLeaves())
    b = await place.connect(hello="b")
    assert [await a.receive(), await b.receive()] == [leaves, leaves]


async def test_a_worker_that_does_not_read_is_cut_off_before_it_costs_much_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_MOST_UNREAD_BYTES", 1 << 20)
    peer = await place.connect(hello="a")
    peer.send(status=STATUS)
    await place.heard.get()
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    assignment = pb.Assignment(job="x" * 100_000)
    for _ in range(100):  # more than the kernel's own buffers and ours
        place.server.send("a", assignment=assignment)
    assert "does not read" in await place.reports.get()


async def test_a_socket_that_was_removed_is_created_again_and_connections_stay(
    place: Place, tmp_path: Path
) -> None:
    a = await place.connect(hello="a")
    a.send(status=STATUS)
    assert await place.heard.get() == ("a", "status")
    place.path.unlink()
    place.path = tmp_path / "anew.sock"
    await place.server.listen_at(place.path)
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
    b = await place.connect(hello="b")
    for name, peer in (("a", a), ("b", b)):
        peer.send(status=STATUS)
        assert await place.heard.get() == (name, "status")
