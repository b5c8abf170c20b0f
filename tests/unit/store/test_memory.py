"""The memory store, beyond the contract, expires leases by itself and bounds its history."""

from __future__ import annotations

import asyncio

import pytest

from elastic.store.interface import WatchCompacted
from elastic.store.memory import MemoryStore


async def test_an_expiry_is_published_without_any_call() -> None:
    store = MemoryStore()
    for ttl_s in (0.03, 0.01):
        await store.put(f"node/{ttl_s}", b"1", lease=await store.grant(ttl_s))
    changes = store.watch("node/", after=2)
    assert [(await anext(changes)).key for _ in range(2)] == ["node/0.01", "node/0.03"]


async def test_a_renewed_lease_ends_later() -> None:
    store = MemoryStore()
    renewed = await store.grant(0.04)
    await store.put("node/renewed", b"1", lease=renewed)
    await store.put("node/left", b"1", lease=await store.grant(0.04))
    await asyncio.sleep(0.02)
    await store.renew(renewed)
    changes = store.watch("node/", after=2)
    assert [(await anext(changes)).key for _ in range(2)] == ["node/left", "node/renewed"]


async def test_only_the_newest_changes_are_kept_and_a_watch_that_follows_misses_none() -> None:
    store = MemoryStore()
    seen: list[int] = []

    async def follow() -> None:
        async for change in store.watch("k", after=0):
            seen.append(change.revision)  # noqa: PERF401 - as they come

    following = asyncio.ensure_future(follow())
    for number in range(10_000):
        await store.put("k", str(number).encode())
        if number % 50 == 0:
            await asyncio.sleep(0)
        assert len(store._history) <= 200
    await asyncio.sleep(0)
    following.cancel()
    assert seen == list(range(1, 10_001))
    with pytest.raises(WatchCompacted):
        await anext(store.watch("k", after=0))


async def test_the_changes_that_are_kept_are_bounded_in_bytes_too() -> None:
    store, value = MemoryStore(), bytes(200 << 10)
    for _ in range(40):
        newest = await store.put("k", value)
        assert sum(len(c.entry.value) for c in store._history if c.entry) <= 1 << 20
    with pytest.raises(WatchCompacted):
        await anext(store.watch("k", after=0))
    last = await anext(store.watch("k", after=newest.modified - 1))
    assert last.revision == newest.modified
