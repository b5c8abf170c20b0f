"""Nodes that are kept out stay out under the next coordinator, and are let in again once."""

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
    """Those of a leader that has just been elected."""
    await store.delete(KEYS.leader)
    leadership = await lead(store, job="job", candidate="c")
    exclusions = Exclusions(store, job="job", guard=leadership.guard)
    await exclusions.load()
    return exclusions


async def test_what_one_coordinator_has_kept_the_next_one_knows() -> None:
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
async def test_cleared_once_for_all_coordinators(state: str) -> None:
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


async def test_what_could_not_be_cleared_can_be_cleared_again() -> None:
    store = FailingStore(Clock())
    exclusions = await elected(store)
    await exclusions.add("n1", DRAINED, "why")
    store.refuses["delete"] = 1
    with pytest.raises(TransientError):
        await exclusions.clear("n1")
    assert await exclusions.clear("n1") is not None
    assert (await elected(store)).names() == []


async def test_another_jobs_nodes_do_not_matter() -> None:
    store = MemoryStore()
    await store.put(JobKeys("job2").drain("n1"), b"{}")
    assert (await elected(store)).names() == []


async def test_a_deposed_coordinator_keeps_nobody_out() -> None:
    store = MemoryStore()
    deposed = await elected(store)
    newest = await elected(store)
    with pytest.raises(GuardFailed):
        await deposed.add("n1", DRAINED, "why")
    await newest.add("n2", DRAINED, "why")
    assert (await elected(store)).names() == ["n2"]


@pytest.mark.parametrize("way", ["refuses", "loses"])
async def test_a_store_that_does_not_answer_is_no_secret(way: str) -> None:
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
    """And no leader from leading."""
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
async def test_whatever_is_stored_keeps_the_node_out_and_can_be_told(value: bytes) -> None:
    store = MemoryStore()
    await store.put(KEYS.drain("n1"), value)
    found = (await elected(store)).get("n1")
    assert found is not None
    told = pb.NodeStatus(reason=found.reason, since_unix_s=found.since_unix_s)
    told.SerializeToString()
    time.localtime(found.since_unix_s)


class SlowStore(MemoryStore):
    """One whose writes take until they may."""

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


async def test_what_is_cleared_while_it_is_written_is_not_out_for_the_next_coordinator() -> None:
    store = SlowStore()
    exclusions = await elected(store)
    exclusions.presume("n1", QUARANTINED, "3 failures")
    store.begun.clear()
    store.may_write.clear()
    keep = asyncio.create_task(exclusions.keep("n1"))
    await store.begun.wait()
    clear = asyncio.create_task(exclusions.clear("n1"))
    await asyncio.sleep(0)
    store.may_write.set()
    await asyncio.gather(keep, clear)
    assert (await elected(store)).names() == []
