"""Following keys yields the entries that exist now, then the changes, and no history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from elastic.core.documents import to_json
from elastic.store.follow import follow, follow_key
from elastic.store.interface import Change, Listing, Store
from elastic.store.job_documents import LeaderDocument
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import Leader, LeaderWatch, find_leader
from tests.contract.conftest import Adapter
from tests.waiting import until


async def _come_and_gone(store: Store, *keys: str) -> int:
    """Put and delete the keys, and return the revision of the last removal."""
    for key in keys:
        await store.put(key, b"history")
        await store.delete(key)
    return (await store.put("elsewhere", b"")).modified - 1


async def test_follow_yields_the_present_entries_and_then_each_change(adapter: Adapter) -> None:
    store = adapter.make()
    first = await store.put("job/a", b"1")
    async with aclosing(follow(store, "job/")) as news:
        assert await anext(news) == Listing((first,), first.modified)
        again = await store.put("job/a", b"2")
        second = await store.put("job/b", b"1")
        await store.delete("job/a")
        told = [await anext(news) for _ in range(3)]
    assert told == [
        Change(key="job/a", revision=again.modified, entry=again),
        Change(key="job/b", revision=second.modified, entry=second),
        Change(key="job/a", revision=second.modified + 1, entry=None),
    ]


async def test_follow_does_not_yield_keys_that_were_removed_before(adapter: Adapter) -> None:
    store = adapter.make()
    await _come_and_gone(store, "job/a", "job/b", "job/a")
    async with aclosing(follow(store, "job/")) as news:
        assert (await _listing(news)).entries == ()
        now = await store.put("job/a", b"now")
        await store.delete("job/a")
        other = await store.put("job/b", b"now")
        told = [await anext(news) for _ in range(3)]
    assert told == [
        Change(key="job/a", revision=now.modified, entry=now),
        Change(key="job/a", revision=now.modified + 1, entry=None),
        Change(key="job/b", revision=other.modified, entry=other),
    ]


async def test_a_change_between_the_listing_and_the_watch_is_yielded(adapter: Adapter) -> None:
    """This includes a removal that is followed by a new entry of the same key."""
    store = adapter.make()
    first = await store.put("job/a", b"1")
    async with aclosing(follow(store, "job/")) as news:
        assert (await _listing(news)).entries == (first,)
        await store.delete("job/a")  # the watch begins when its first change is asked for
        second = await store.put("job/a", b"2")
        assert await anext(news) == Change(key="job/a", revision=second.modified - 1, entry=None)
        assert await anext(news) == Change(key="job/a", revision=second.modified, entry=second)


async def _listing(news: AsyncGenerator[Listing | Change, None]) -> Listing:
    item = await anext(news)
    assert isinstance(item, Listing)
    return item


async def test_follow_lists_again_when_the_history_was_compacted(adapter: Adapter) -> None:
    store = adapter.make()
    kept = await store.put("job/kept", b"1")
    async with aclosing(follow(store, "job/")) as news:
        assert (await _listing(news)).entries == (kept,)
        # The watch has not begun yet.
        await adapter.compact(store, await _come_and_gone(store, "job/a", "job/b"))
        assert (await _listing(news)).entries == (kept,)
        new = await store.put("job/new", b"1")
        assert await anext(news) == Change(key="job/new", revision=new.modified, entry=new)


async def test_follow_key_ignores_keys_that_share_its_prefix(adapter: Adapter) -> None:
    store = adapter.make()
    await store.put("nodes/n10", b"1")
    async with aclosing(follow_key(store, "nodes/n1")) as entries:
        assert await anext(entries) is None
        await store.put("nodes/n11", b"1")
        mine = await store.put("nodes/n1", b"1")
        assert await anext(entries) == mine
        await store.delete("nodes/n10")
        await store.delete("nodes/n1")
        assert await anext(entries) is None


async def test_all_that_wait_for_a_leader_learn_of_each_new_one(adapter: Adapter) -> None:
    store = adapter.make()
    watch = LeaderWatch(store, job="job")
    running = asyncio.create_task(watch.run())
    asking = [asyncio.create_task(watch.newer()) for _ in range(3)]
    assert await find_leader(store, job="job") is None
    one = await _elect(store, "one:1")
    assert await asyncio.gather(*asking) == [one] * 3
    assert await find_leader(store, job="job") == one
    async with aclosing(watch.leaders()) as leaders:
        assert await anext(leaders) == one
        asking = [asyncio.create_task(watch.newer(one)) for _ in range(3)]
        await store.delete(JobKeys("job").leader)
        again = await _elect(store, "one:1")
        assert again.term > one.term
        assert await anext(leaders) == again
    assert await asyncio.gather(*asking) == [again] * 3
    running.cancel()


async def test_the_last_leader_stays_known_while_none_leads_or_is_readable(
    adapter: Adapter,
) -> None:
    store = adapter.make()
    watch = LeaderWatch(store, job="job")
    running = asyncio.create_task(watch.run())
    one = await _elect(store, "one:1")
    assert await watch.newer() == one
    assert not watch.vacant
    await store.delete(JobKeys("job").leader)
    await until(lambda: watch.vacant)
    assert watch.leader == one
    await store.put(JobKeys("job").leader, b"of another version")
    await until(lambda: not watch.vacant)
    assert watch.leader == one
    running.cancel()


async def _elect(store: Store, address: str) -> Leader:
    document = LeaderDocument(candidate=address, address=address)
    entry = await store.put(JobKeys("job").leader, to_json(document))
    return Leader(address=address, term=entry.created)
