"""A node looks for its leader once registered."""

from __future__ import annotations

import asyncio

from elastic.agent.registration import LeaderOnceRegistered
from elastic.core.documents import to_json
from elastic.store.job_documents import LeaderDocument
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import LeaderWatch
from elastic.store.memory import MemoryStore


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
