"""A node looks for its leader once registered, and notices when it is cut off for too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic.agent import registration
from elastic.agent.registration import (
    LastContact,
    LeaderOnceRegistered,
    Registration,
    watch_isolation,
)
from elastic.store.job_documents import LeaderDocument, to_json
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import LeaderWatch
from elastic.store.memory import MemoryStore
from tests.unit.store.failing_store import Clock

TIMEOUT_S = 30.0


class Renewals(Registration):
    """A registration whose last renewal the test sets."""

    def __init__(self) -> None:
        self.at_s = 0.0

    @property
    def renewed_at_s(self) -> float:
        return self.at_s


class Node:
    """A node under watch, whose clock only the test moves."""

    def __init__(self, clock: Clock, contact: LastContact, goes_on: bool) -> None:
        self.clock = clock
        self.registration = Renewals()
        self.contact = False
        self.told: list[float] = []
        self.looks = 0
        self.watching = asyncio.create_task(
            watch_isolation(
                self.registration,
                timeout_s=TIMEOUT_S,
                in_contact=self._in_contact,
                cut_off=self.told.append,
                contact=contact,
                goes_on=goes_on,
            )
        )

    def _in_contact(self) -> bool:
        self.looks += 1
        return self.contact

    async def after(self, now: float) -> list[float]:
        """Move the clock to `now`; return what the node has been told by then."""
        self.clock.now = now
        looks = self.looks
        while self.looks < looks + 2:
            await asyncio.sleep(0.001)
        return self.told


@asynccontextmanager
async def watching(
    monkeypatch: pytest.MonkeyPatch,
    contact: LastContact,
    *,
    goes_on: bool = False,
    begins_at: float = 0.0,
) -> AsyncIterator[Node]:
    clock = Clock()
    clock.now = begins_at
    monkeypatch.setattr(registration, "_LOOK_S", 0.001)
    monkeypatch.setattr(registration, "boot_time_s", clock)
    node = Node(clock, contact, goes_on)
    try:
        await node.after(begins_at)
        yield node
    finally:
        node.watching.cancel()


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    async with watching(monkeypatch, LastContact(Path("/dev/null"))) as node:
        yield node


async def test_a_node_without_store_and_coordinator_for_too_long_is_told_once(node: Node) -> None:
    assert await node.after(TIMEOUT_S - 0.1) == []
    assert await node.after(TIMEOUT_S) == [TIMEOUT_S]
    assert await node.after(9 * TIMEOUT_S) == [TIMEOUT_S]


async def test_a_node_that_reaches_the_store_alone_is_not_cut_off(node: Node) -> None:
    node.registration.at_s = 100.0
    assert await node.after(100.0 + TIMEOUT_S - 0.1) == []
    node.registration.at_s = 120.0
    assert await node.after(120.0 + TIMEOUT_S - 0.1) == []
    assert await node.after(120.0 + TIMEOUT_S) == [TIMEOUT_S]


async def test_a_node_that_reaches_the_coordinator_alone_is_not_cut_off(node: Node) -> None:
    node.contact = True
    for now in (100.0, 200.0):
        assert await node.after(now) == []
    node.contact = False
    assert await node.after(200.0 + TIMEOUT_S - 0.1) == []
    assert await node.after(200.0 + TIMEOUT_S) == [TIMEOUT_S]


@pytest.mark.parametrize(("goes_on", "left_s"), [(True, 10.0), (False, TIMEOUT_S)])
async def test_only_an_agent_that_adopts_workers_counts_from_the_earlier_last_contact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, goes_on: bool, left_s: float
) -> None:
    """Otherwise a node that is cut off could train on for longer than others wait for it."""
    contact = LastContact(tmp_path / "last-contact")
    async with watching(monkeypatch, contact) as node:
        node.registration.at_s = 50.0
        assert await node.after(60.0) == []
        while contact.last() != 50.0:  # noted by a thread
            await asyncio.sleep(0.001)
    now = 50.0 + TIMEOUT_S - 10.0
    async with watching(monkeypatch, contact, goes_on=goes_on, begins_at=now) as node:
        assert await node.after(now + left_s - 0.1) == []
        assert len(await node.after(now + left_s)) == 1


async def test_a_contact_that_comes_while_a_note_is_written_is_noted_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The contact came while the disk was slow, and is the last one: it must not be lost."""
    writes = threading.Event()

    class Slow(LastContact):
        def note(self, at_s: float) -> None:
            writes.wait(10.0)
            super().note(at_s)

    contact = Slow(tmp_path / "last-contact")
    async with watching(monkeypatch, contact) as node:
        node.registration.at_s = 50.0
        await node.after(60.0)
        writes.set()
        while contact.last() != 50.0:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kept", ["", "another-boot 50.0 ", "x y z", "\xff"])
def test_an_illegible_or_earlier_boots_last_contact_is_ignored(tmp_path: Path, kept: str) -> None:
    (tmp_path / "last-contact").write_text(kept)
    assert LastContact(tmp_path / "last-contact").last() is None
    assert LastContact(tmp_path / "nothing").last() is None


async def test_a_node_that_is_cut_off_again_is_told_again(node: Node) -> None:
    await node.after(TIMEOUT_S)
    node.registration.at_s = 50.0
    assert len(await node.after(51.0)) == 1
    assert len(await node.after(50.0 + TIMEOUT_S)) == 2


async def test_a_node_gets_no_leader_before_it_is_registered() -> None:
    store = MemoryStore()
    document = LeaderDocument(candidate="c", address="one:1")
    await store.put(JobKeys("job").leader, to_json(document))
    watch = LeaderWatch(store, job="job")
    watching = asyncio.create_task(watch.run())
    leaders = LeaderOnceRegistered(watch)
    asking = asyncio.create_task(leaders.newer())
    while watch.leader is None:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done()
    leaders.registered.set()
    first = await asking
    assert first.address == "one:1"
    asking = asyncio.create_task(leaders.newer(first))
    await store.delete(JobKeys("job").leader)
    document = LeaderDocument(candidate="d", address="two:1")
    await store.put(JobKeys("job").leader, to_json(document))
    assert (await asking).address == "two:1"
    watching.cancel()


async def test_a_disk_that_does_not_answer_does_not_keep_a_node_from_being_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = threading.Event()

    class Hangs(LastContact):
        def note(self, at_s: float) -> None:
            del at_s
            assert answers.wait(60.0)

    clock = Clock()
    monkeypatch.setattr(registration, "boot_time_s", lambda: clock.now)
    monkeypatch.setattr(registration, "_LOOK_S", 0.001)
    node = Node(clock, Hangs(tmp_path / "last-contact"), goes_on=False)
    begun = clock.now
    try:
        assert await node.after(begun + 1.0) == []
        assert await node.after(begun + TIMEOUT_S + 2.0) != []
    finally:
        answers.set()
        node.watching.cancel()


@pytest.mark.parametrize("at_s", ["nan", "inf", "1e300", "x", ""])
def test_an_illegible_or_future_last_contact_is_ignored(tmp_path: Path, at_s: str) -> None:
    """Otherwise the node would never count as cut off."""
    contact = LastContact(tmp_path / "last-contact")
    contact.note(1.0)
    boot = (tmp_path / "last-contact").read_text().split()[0]
    (tmp_path / "last-contact").write_text(f"{boot} {at_s} ")
    assert contact.last() is None
