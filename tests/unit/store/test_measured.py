"""Calls to the store are timed, and failed ones are counted."""

from __future__ import annotations

import pytest

from elastic.errors import TransientError
from elastic.store.interface import Guard, GuardFailed
from elastic.store.measured import MeasuredStore, StoreCalls
from elastic.store.memory import MemoryStore


class Silent(MemoryStore):
    async def get(self, key: str) -> None:
        raise TransientError(f"{key}: nobody answers")


async def test_calls_and_failures_are_counted_by_kind() -> None:
    calls = StoreCalls()
    store = MeasuredStore(Silent(), calls)
    assert calls.answered_unix_s is None
    entry = await store.put("a", b"1")
    assert calls.answered_unix_s is not None
    with pytest.raises(TransientError):
        await store.get("a")
    with pytest.raises(GuardFailed):
        await store.put("a", b"2", guard=Guard(key="b", created=entry.created))
    assert {kind: n for kind, n in calls.errors.items() if n} == {"get": 1}
    counts = {kind: sum(h.counts) for kind, h in calls.durations.items()}
    assert {kind: n for kind, n in counts.items() if n} == {"get": 1, "put": 2}


async def test_a_measured_store_behaves_like_the_store_inside() -> None:
    store = MeasuredStore(MemoryStore(), StoreCalls())
    lease = await store.grant(10.0)
    created = await store.create("a", b"1", lease=lease)
    assert created is not None
    assert [e.key for e in await store.list("")] == ["a"]
    await store.renew(lease)
    changes = store.watch("", after=created.modified)
    await store.revoke(lease)
    assert (await anext(changes)).entry is None
    assert not await store.delete("a")
