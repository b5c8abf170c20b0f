"""Agents register their nodes' names, and the leader is notified."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import pytest

from elastic.agent.registration import Registration
from elastic.coordinator.node_registry import NodeRegistry
from elastic.core.documents import to_json
from elastic.errors import ConfigurationError, TransientError
from elastic.store.interface import Change, Entry, Store
from elastic.store.job_documents import NodeDocument, node_from_json
from elastic.store.job_keys import JobKeys
from elastic.store.lease_keeper import LeaseState
from elastic.store.memory import MemoryStore
from tests.contract.conftest import Adapter
from tests.waiting import until

HELD, SUSPECT, GONE = LeaseState.HELD, LeaseState.SUSPECT, LeaseState.GONE
DEADLINE_S = 30.0
NEVER_S = 1e6
KEYS = JobKeys("job")


def document(token: str, *, started_unix_s: float = 0.0) -> NodeDocument:
    return NodeDocument(
        start_token=token,
        host=f"host-of-{token}",
        slots=2,
        version="1",
        command_digest="d",
        started_unix_s=started_unix_s,
    )


class Agent:
    """A node's registration, kept from `start` until it is closed or killed."""

    def __init__(self, store: Store, node: str, of: NodeDocument, *, ttl_s: float = 5.0) -> None:
        self.store = store
        self.key = KEYS.node(node)
        self.told: list[LeaseState] = []
        self.waited: list[tuple[str, float]] = []
        self.registration = Registration(
            store,
            job="job",
            node=node,
            document=of,
            on_change=self.told.append,
            on_waiting=lambda *waited: self.waited.append(waited),
            ttl_s=ttl_s,
        )

    async def start(self) -> None:
        await self.registration.register()
        self.keeping = asyncio.create_task(self.registration.keep())

    async def kill(self) -> None:
        """Stop all work of the agent, without ending its lease."""
        keeper = self.registration._claim._keeping
        assert keeper is not None
        for task in (self.keeping, keeper):
            task.cancel()
        await asyncio.gather(self.keeping, keeper, return_exceptions=True)

    async def entry(self) -> Entry:
        found = await self.store.get(self.key)
        assert found is not None
        return found

    async def lose_lease(self) -> None:
        await self.store.revoke((await self.entry()).lease)

    async def until_told(self, *states: LeaseState) -> None:
        await until(lambda: self.told == list(states))


@dataclass
class Heard:
    """Records the notices that the leader receives, in order."""

    words: list[tuple[str, str, object]] = field(default_factory=list)
    vanished_at: list[float] = field(default_factory=list)
    gone_at: list[float] = field(default_factory=list)

    def node_registered(self, node: str, document: NodeDocument) -> None:
        self.words.append(("registered", node, document.start_token))

    def node_vanished(self, node: str) -> None:
        self.words.append(("vanished", node, None))
        self.vanished_at.append(time.monotonic())

    def node_gone(self, node: str, start_token: str | None) -> None:
        self.words.append(("gone", node, start_token))
        self.gone_at.append(time.monotonic())

    async def until(self, *words: tuple[str, str, object]) -> None:
        await until(lambda: self.words == list(words))


@contextlib.asynccontextmanager
async def leader(
    store: Store, *, isolation_timeout_s: float = NEVER_S, margin_s: float = 0.0, **more: object
) -> AsyncIterator[tuple[NodeRegistry, Heard]]:
    heard = Heard()
    registry = NodeRegistry(
        store,
        heard,
        job="job",
        isolation_timeout_s=isolation_timeout_s,
        margin_s=margin_s,
        **more,  # type: ignore[arg-type]
    )
    running = asyncio.create_task(registry.run())
    try:
        yield registry, heard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_node_that_closes_its_registration_is_gone_at_once(adapter: Adapter) -> None:
    store = adapter.make()
    before = Agent(store, "n1", document("a"))
    await before.start()
    async with leader(store) as (_, heard):
        later = Agent(store, "n2", document("b"))
        await later.start()
        await heard.until(("registered", "n1", "a"), ("registered", "n2", "b"))
        assert node_from_json((await later.entry()).value) == document("b")
        for agent in (before, later):
            await agent.registration.close()
            await agent.keeping
            assert agent.told == [HELD]
            assert await store.get(agent.key) is None
        await heard.until(
            ("registered", "n1", "a"),
            ("registered", "n2", "b"),
            ("gone", "n1", "a"),
            ("gone", "n2", "b"),
        )


async def test_a_node_that_lost_its_lease_registers_again_and_is_not_gone(adapter: Adapter) -> None:
    store = adapter.make()
    agent, other = (Agent(store, f"n{i}", document(f"{i}")) for i in (1, 2))
    await agent.start()
    await other.start()
    async with leader(store, isolation_timeout_s=3.0) as (_, heard):
        await heard.until(("registered", "n1", "1"), ("registered", "n2", "2"))
        first = await agent.entry()
        await agent.lose_lease()
        await agent.until_told(HELD, GONE, HELD)
        assert (await agent.entry()).lease != first.lease
        assert agent.registration.held()
        # n2 loses its lease later, and is gone. n1 would have been gone before it.
        await other.kill()
        await other.lose_lease()
        await heard.until(
            ("registered", "n1", "1"),
            ("registered", "n2", "2"),
            ("vanished", "n1", None),
            ("registered", "n1", "1"),
            ("vanished", "n2", None),
            ("gone", "n2", "2"),
        )
    await agent.registration.close()


async def test_a_vanished_node_is_gone_after_isolation_timeout_and_margin(adapter: Adapter) -> None:
    store = adapter.make()
    agent = Agent(store, "n1", document("a"))
    await agent.start()
    async with leader(store, isolation_timeout_s=0.3, margin_s=0.2) as (_, heard):
        await heard.until(("registered", "n1", "a"))
        await agent.kill()
        await agent.lose_lease()
        await heard.until(("registered", "n1", "a"), ("vanished", "n1", None), ("gone", "n1", "a"))
        assert heard.gone_at[0] >= heard.vanished_at[0] + 0.5


async def test_a_vanished_agent_is_gone_only_later_when_another_takes_its_name(
    adapter: Adapter,
) -> None:
    store = adapter.make()
    before, after = (Agent(store, "n1", document(token)) for token in "ab")
    await before.start()
    async with leader(store, isolation_timeout_s=3.0) as (_, heard):
        await heard.until(("registered", "n1", "a"))
        await before.kill()
        await before.lose_lease()
        await after.start()
        await heard.until(
            ("registered", "n1", "a"),
            ("vanished", "n1", None),
            ("registered", "n1", "b"),
            ("gone", "n1", "a"),
        )
    await after.registration.close()


async def test_a_node_that_lost_its_lease_is_gone_only_once_disconnected(adapter: Adapter) -> None:
    store = adapter.make()
    agent, other = (Agent(store, f"n{i}", document(f"{i}")) for i in (1, 2))
    await agent.start()
    await other.start()
    async with leader(store, isolation_timeout_s=0.3) as (registry, heard):
        await heard.until(("registered", "n1", "1"), ("registered", "n2", "2"))
        registry.connected("n1", "1")
        for each in (agent, other):
            await each.kill()
            await each.lose_lease()
        told = [("registered", "n1", "1"), ("registered", "n2", "2")]
        told += [("vanished", "n1", None), ("vanished", "n2", None), ("gone", "n2", "2")]
        await heard.until(*told)
        disconnected_at = time.monotonic()
        registry.disconnected("n1", "1")
        await heard.until(*told, ("gone", "n1", "1"))
        assert heard.gone_at[-1] >= disconnected_at + 0.3


async def test_nodes_that_a_new_leader_does_not_find_vanish_and_are_gone(adapter: Adapter) -> None:
    store = adapter.make()
    same, later, other = (Agent(store, f"n{i}", document(f"{i}")) for i in (1, 2, 4))
    await same.start()
    await other.start()
    decided = await store.put(KEYS.generation, b"")
    await later.start()
    nodes = ["n1@1", "n2@2", "n3@3", "n4@before"]
    expected = {"expected": nodes, "as_of": decided.modified}
    async with leader(store, isolation_timeout_s=0.3, **expected) as (_, heard):
        first = [
            ("vanished", "n2", None),
            ("vanished", "n3", None),
            ("vanished", "n4", None),
            ("registered", "n1", "1"),
            ("registered", "n2", "2"),
            ("registered", "n4", "4"),
        ]
        gone = [("gone", node, None) for node in ("n2", "n3", "n4")]
        await until(lambda: len(heard.words) == len(first) + len(gone))
        assert heard.words[: len(first)] == first
        assert sorted(heard.words[len(first) :]) == gone
    for agent in (same, later, other):
        await agent.registration.close()


class CutOff(MemoryStore):
    """A store that this process reaches only at times: while `cut`, no call is answered, and no
    watcher hears of anything."""

    cut = False
    asked = 0

    async def get(self, key: str) -> Entry | None:
        self.asked += 1
        if self.cut:
            raise TransientError("cut off")
        return await super().get(key)

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Change, None]:
        async for change in super().watch(prefix, after=after):
            while self.cut:
                await asyncio.sleep(0.01)
            yield change


@pytest.mark.parametrize("returns", [True, False])
async def test_a_leader_that_was_cut_off_itself_declares_no_node_gone_that_is_back(
    returns: bool,
) -> None:
    store = CutOff()
    await store.put(KEYS.node("n1"), to_json(document("a")))
    async with leader(store, isolation_timeout_s=0.05) as (_, heard):
        await heard.until(("registered", "n1", "a"))
        await store.delete(KEYS.node("n1"))
        told = [("registered", "n1", "a"), ("vanished", "n1", None)]
        await heard.until(*told)
        store.cut = True
        if returns:
            await store.put(KEYS.node("n1"), to_json(document("a")))
        await until(lambda: store.asked >= 2)
        assert heard.words == told
        store.cut = False
        last = "registered" if returns else "gone"
        await heard.until(*told, (last, "n1", "a"))


async def test_a_restarted_agent_takes_over_its_registration(adapter: Adapter) -> None:
    store = adapter.make()
    before = Agent(store, "n1", document("a", started_unix_s=1.0))
    after = Agent(store, "n1", document("a", started_unix_s=2.0))
    await before.start()
    first = await before.entry()
    async with leader(store) as (_, heard):
        await heard.until(("registered", "n1", "a"))
        await before.kill()
        await after.start()
        second = await after.entry()
        assert second.created == first.created
        assert second.lease != first.lease
        await store.revoke(first.lease)
        assert await after.entry() == second
        # No loss is reported: there was none.
        await after.registration.close()
        await heard.until(("registered", "n1", "a"), ("registered", "n1", "a"), ("gone", "n1", "a"))


async def test_an_agent_whose_name_is_taken_fails_and_names_the_owner(adapter: Adapter) -> None:
    store = adapter.make()
    owner = Agent(store, "n1", document("a", started_unix_s=1_000_000_000.0))
    await owner.start()
    before = await owner.entry()
    late = Agent(store, "n1", document("b"), ttl_s=1.0)
    asked_at = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        await late.start()
    assert time.monotonic() - asked_at >= 2.0
    assert str(caught.value) == (
        "the node name 'n1' of the job 'job' is taken by an agent on host 'host-of-a', "
        "started 2001-09-09 01:46:40 UTC; stop that one, or give this one another name with "
        "--node-name"
    )
    assert await owner.entry() == before
    assert late.told == []
    owned_by = "an agent on host 'host-of-a', started 2001-09-09 01:46:40 UTC"
    assert late.waited == [(owned_by, 2.0)]
    assert owner.waited == []
    await owner.registration.close()


async def test_an_agent_registers_when_its_name_becomes_free_in_time(adapter: Adapter) -> None:
    store = adapter.make()
    owner, late = (Agent(store, "n1", document(token)) for token in "ab")
    await owner.start()
    starting = asyncio.create_task(late.start())
    await asyncio.sleep(0.1)
    assert not starting.done()
    await owner.registration.close()
    await starting
    assert node_from_json((await late.entry()).value) == document("b")
    await late.registration.close()


async def test_a_second_agent_in_the_same_directory_ends_the_first(adapter: Adapter) -> None:
    store = adapter.make()
    first = Agent(store, "n1", document("a"), ttl_s=1.0)
    second = Agent(store, "n1", document("a"))
    await first.start()
    await second.start()
    with pytest.raises(ConfigurationError, match="'n1' of the job 'job' is taken by an agent"):
        await first.keeping
    assert first.told == [HELD, GONE]
    assert second.told == [HELD]
    await second.registration.close()


async def test_an_unreadable_registration_is_no_node_but_keeps_its_name(adapter: Adapter) -> None:
    store = adapter.make()
    await store.put(KEYS.node("n1"), b"of another version")
    agent = Agent(store, "n1", document("a"), ttl_s=0.0)
    async with leader(store) as (_, heard):
        with pytest.raises(ConfigurationError, match="a registration that this version cannot"):
            await agent.start()
        left = dataclasses.replace(document("b"), left=True)
        await store.put(KEYS.node("n2"), to_json(left))
        await heard.until(("gone", "n2", "b"))
