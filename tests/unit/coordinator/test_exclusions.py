"""Nodes that are kept out stay out under the next coordinator, until they are cleared once."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import given

from elastic.coordinator.leadership import lead
from elastic.coordinator.node_registry import DRAINED, QUARANTINED, Exclusions
from elastic.errors import TransientError
from elastic.store.interface import Entry, Guard, GuardFailed
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from tests.fuzzed_documents import documents, thoroughly
from tests.unit.store.failing_store import Clock, FailingStore

KEYS = JobKeys("job")


async def elected(store: MemoryStore) -> Exclusions:
    """The exclusions of a leader that has just been elected."""
    await store.delete(KEYS.leader)
    leadership = await lead(store, job="job", candidate="c")
    exclusions = Exclusions(store, job="job", guard=leadership.guard)
    await exclusions.load()
    return exclusions


async def test_the_next_coordinator_knows_which_nodes_are_kept_out_and_why() -> None:
    store, before = MemoryStore(), time.time()
    first = await elected(store)
    assert first.names() == []
    assert first.get("n1") is None
    await first.add("n2", DRAINED, "a new disk")
    await first.add("n1", QUARANTINED, "3 failures")
    second = await elected(store)
    assert first.names() == second.names() == ["n1", "n2"]
    for name, state, reason in (("n1", QUARANTINED, "3 failures"), ("n2", DRAINED, "a new d")):
        found = second.get(name)
        assert found is not None
        assert found == first.get(name)
        assert found.state == state
        assert found.reason.startswith(reason)
        assert before <= found.since_unix_s <= time.time()


@pytest.mark.parametrize("state", [DRAINED, QUARANTINED])
async def test_a_node_is_cleared_once_for_all_coordinators(state: str) -> None:
    store = MemoryStore()
    first = await elected(store)
    await first.add("n1", state, "why")
    second = await elected(store)
    cleared = await second.clear("n1")
    assert cleared is not None
    assert cleared.state == state
    assert await second.clear("n1") is None
    assert second.names() == (await elected(store)).names() == []


async def test_a_node_that_was_quarantined_and_then_drained_is_cleared_of_both() -> None:
    store = MemoryStore()
    exclusions = await elected(store)
    await exclusions.add("n1", QUARANTINED, "3 failures")
    await exclusions.add("n1", DRAINED, "a new disk")
    cleared = await exclusions.clear("n1")
    assert cleared is not None
    assert cleared.state == DRAINED
    assert (await elected(store)).names() == []


async def test_a_clear_that_failed_can_be_repeated() -> None:
    store = FailingStore(Clock())
    exclusions = await elected(store)
    await exclusions.add("n1", DRAINED, "why")
    store.refuses["delete"] = 1
    with pytest.raises(TransientError):
        await exclusions.clear("n1")
    assert await exclusions.clear("n1") is not None
    assert (await elected(store)).names() == []


async def test_exclusions_of_another_job_are_ignored() -> None:
    store = MemoryStore()
    await store.put(JobKeys("job2").drain("n1"), b"{}")
    assert (await elected(store)).names() == []


async def test_a_deposed_coordinator_cannot_keep_a_node_out() -> None:
    store = MemoryStore()
    deposed = await elected(store)
    newest = await elected(store)
    with pytest.raises(GuardFailed):
        await deposed.add("n1", DRAINED, "why")
    await newest.add("n2", DRAINED, "why")
    assert (await elected(store)).names() == ["n2"]


@pytest.mark.parametrize("way", ["refuses", "loses"])
async def test_an_exclusion_that_could_not_be_stored_raises_and_can_be_repeated(way: str) -> None:
    store = FailingStore(Clock())
    exclusions = await elected(store)
    getattr(store, way)["put"] = 1
    with pytest.raises(TransientError):
        await exclusions.add("n1", DRAINED, "why")
    await exclusions.add("n1", DRAINED, "why")
    assert (await elected(store)).names() == ["n1"]


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"[]", b"null", b'{"reason": "x"}', b'{"since_unix_s": {}}', b"[" * 10**5],
)
async def test_an_entry_that_cannot_be_read_keeps_its_node_out(value: bytes) -> None:
    """The entry does not keep a leader from leading."""
    store = MemoryStore()
    await store.put(KEYS.drain("n1"), value)
    exclusions = await elected(store)
    found = exclusions.get("n1")
    assert found is not None
    assert found.state == DRAINED
    assert KEYS.drain("n1") in found.reason
    assert await exclusions.clear("n1") is not None
    assert (await elected(store)).names() == []


@thoroughly
@given(value=documents(json.dumps({"reason": "a new disk", "since_unix_s": 1.75e9}).encode()))
async def test_any_stored_value_keeps_the_node_out_and_fits_into_the_status(value: bytes) -> None:
    store = MemoryStore()
    await store.put(KEYS.drain("n1"), value)
    found = (await elected(store)).get("n1")
    assert found is not None
    told = pb.NodeStatus(reason=found.reason, since_unix_s=found.since_unix_s)
    told.SerializeToString()
    time.localtime(found.since_unix_s)


class SlowStore(MemoryStore):
    """A store whose writes wait until `may_write` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_write = asyncio.Event(), asyncio.Event()
        self.may_write.set()

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        self.begun.set()
        await self.may_write.wait()
        return await super().put(key, value, guard=guard, lease=lease)


async def test_a_quarantine_cleared_while_it_is_written_does_not_outlive_the_leader() -> None:
    store = SlowStore()
    exclusions = await elected(store)
    exclusions.add_now("n1", QUARANTINED, "3 failures")
    store.begun.clear()
    store.may_write.clear()
    keep = asyncio.create_task(exclusions.keep("n1"))
    await store.begun.wait()
    clear = asyncio.create_task(exclusions.clear("n1"))
    await asyncio.sleep(0)
    store.may_write.set()
    await asyncio.gather(keep, clear)
    assert (await elected(store)).names() == []
