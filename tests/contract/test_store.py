"""Every store, in memory or in etcd, has the semantics of elastic/store/interface.py."""

from __future__ import annotations

import asyncio

import pytest

from elastic.store.interface import Guard, GuardFailed, LeaseLost, Listing, Store, WatchCompacted
from tests.contract.conftest import Adapter, take

UNKNOWN_LEASE = 123456789


async def now(store: Store) -> int:
    """Return the store's revision. A store that others use too may have compacted old ones."""
    return (await store.put("somewhere-else", b"")).modified


async def test_get_returns_what_was_put(adapter: Adapter) -> None:
    store = adapter.make()
    assert await store.get("a") is None
    entry = await store.put("a", b"\x00\xff")
    assert (entry.key, entry.value, entry.lease) == ("a", b"\x00\xff", 0)
    assert await store.get("a") == entry
    assert await store.get("a/") is None


async def test_list_returns_the_keys_with_a_prefix_in_order(adapter: Adapter) -> None:
    store = adapter.make()
    for key in ("job/b", "job/a", "job", "jobs/x", "job/c/d"):
        await store.put(key, key.encode())
    assert [e.key for e in await store.list("job/")] == ["job/a", "job/b", "job/c/d"]
    assert [e.value for e in await store.list("jobs")] == [b"jobs/x"]
    assert list(await store.list("nothing")) == []


async def test_each_write_of_any_key_raises_the_revision_by_one(adapter: Adapter) -> None:
    store = adapter.make()
    first = await store.put("a", b"1")
    other = await store.put("b", b"1")
    again = await store.put("a", b"2")
    assert first.created == first.modified
    assert other.modified == first.modified + 1
    assert (again.created, again.modified) == (first.created, other.modified + 1)


async def test_a_failed_write_changes_neither_keys_nor_revision(adapter: Adapter) -> None:
    store = adapter.make()
    before = await store.put("a", b"1")
    assert await store.create("a", b"2") is None
    assert not await store.delete("absent")
    with pytest.raises(GuardFailed):
        await store.put("b", b"2", guard=Guard(key="absent", created=1))
    with pytest.raises(LeaseLost):
        await store.put("b", b"2", lease=UNKNOWN_LEASE)
    assert await store.get("b") is None
    assert await store.get("a") == before
    assert (await store.put("c", b"3")).modified == before.modified + 1


async def test_create_succeeds_once_for_a_key(adapter: Adapter) -> None:
    store = adapter.make()
    entries = await asyncio.gather(*(store.create("leader", b"%d" % i) for i in range(5)))
    winners = [e for e in entries if e is not None]
    assert len(winners) == 1
    assert await store.get("leader") == winners[0]


async def test_a_key_created_again_has_a_new_created_revision(adapter: Adapter) -> None:
    store = adapter.make()
    first = await store.put("a", b"1")
    assert await store.delete("a")
    assert await store.get("a") is None
    assert not await store.delete("a")
    second = await store.create("a", b"1")
    assert second is not None
    assert second.created > first.created + 1  # the removal counts too


async def test_the_right_guard_lets_writes_through(adapter: Adapter) -> None:
    store = adapter.make()
    leader = await store.put("leader", b"me")
    guard = Guard(key="leader", created=leader.created)
    await store.put("generation", b"1", guard=guard)
    await store.put("leader", b"me, still", guard=guard)  # its value may change
    await store.put("generation", b"2", guard=guard)
    assert await store.delete("generation", guard=guard)


async def test_a_guard_under_another_lease_stops_writes(adapter: Adapter) -> None:
    """An emptied store counts from 1 again: two leaders can be created at the same revision."""
    store = adapter.make()
    lease, other = await store.grant(60.0), await store.grant(60.0)
    leader = await store.put("leader", b"me", lease=lease)
    await store.put("generation", b"1", guard=Guard.of(leader))
    for wrong in (other, 0):
        guard = Guard(key="leader", created=leader.created, lease=wrong)
        with pytest.raises(GuardFailed):
            await store.put("generation", b"2", guard=guard)
        with pytest.raises(GuardFailed):
            await store.delete("generation", guard=guard)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "created again"])
async def test_a_guard_whose_key_is_gone_or_new_stops_writes(adapter: Adapter, again: bool) -> None:
    store = adapter.make()
    leader = await store.put("leader", b"me")
    kept = await store.put("generation", b"1")
    await store.delete("leader")
    if again:
        await store.put("leader", b"me")
    guard = Guard(key="leader", created=leader.created)
    with pytest.raises(GuardFailed):
        await store.put("generation", b"2", guard=guard)
    with pytest.raises(GuardFailed):
        await store.delete("generation", guard=guard)
    assert await store.get("generation") == kept


async def test_an_expired_lease_removes_its_keys(adapter: Adapter) -> None:
    store = adapter.make()
    lease = await store.grant(adapter.ttl_s)
    leader = await store.create("leader", b"me", lease=lease)
    assert leader is not None
    assert leader.lease == lease
    await store.put("beside", b"stays")
    await adapter.pass_s(adapter.ttl_s * 0.5)
    assert await store.get("leader") == leader
    await adapter.pass_s(adapter.ttl_s * 2)
    assert [e.key for e in await store.list("")] == ["beside"]
    guard = Guard(key="leader", created=leader.created)
    with pytest.raises(GuardFailed):
        await store.put("generation", b"1", guard=guard)
    assert await store.create("leader", b"other") is not None


async def test_renewing_keeps_a_lease(adapter: Adapter) -> None:
    store = adapter.make()
    lease = await store.grant(adapter.ttl_s)
    await store.put("a", b"1", lease=lease)
    for _ in range(4):
        await adapter.pass_s(adapter.ttl_s * 0.6)
        await store.renew(lease)
    assert await store.get("a") is not None
    await adapter.pass_s(adapter.ttl_s * 2)
    assert await store.get("a") is None


async def test_a_lease_that_is_gone_cannot_be_renewed_or_used(adapter: Adapter) -> None:
    store = adapter.make()
    lease = await store.grant(adapter.ttl_s)
    await store.put("a", b"1", lease=lease)
    await store.revoke(lease)
    assert await store.get("a") is None
    await store.revoke(lease)
    await store.revoke(UNKNOWN_LEASE)
    for gone in (lease, UNKNOWN_LEASE):
        with pytest.raises(LeaseLost):
            await store.renew(gone)
        with pytest.raises(LeaseLost):
            await store.create("a", b"1", lease=gone)
    expired = await store.grant(adapter.ttl_s)
    await adapter.pass_s(adapter.ttl_s * 2)
    with pytest.raises(LeaseLost):
        await store.renew(expired)


async def test_a_key_written_again_without_its_lease_outlives_that_lease(adapter: Adapter) -> None:
    store = adapter.make()
    one, two = await store.grant(adapter.ttl_s), await store.grant(adapter.ttl_s)
    for key in ("without", "other", "removed"):
        await store.put(key, b"1", lease=one)
    await store.put("without", b"2")
    await store.put("other", b"2", lease=two)
    await store.delete("removed")
    await store.put("removed", b"2")
    await store.revoke(one)
    assert [e.key for e in await store.list("")] == ["other", "removed", "without"]
    await store.revoke(two)
    assert [e.key for e in await store.list("")] == ["removed", "without"]


async def test_a_watch_tells_everything_after_its_revision_in_order(adapter: Adapter) -> None:
    store = adapter.make()
    before = await store.put("job/a", b"0")
    written = [await store.put(f"job/{k}", b"1") for k in ("b", "a")]
    changes = store.watch("job/", after=before.modified)
    assert [c.entry for c in await take(changes, 2)] == written
    late = await store.put("job/c", b"2")
    await store.delete("job/a")
    put, removed = await take(changes, 2)
    assert (put.key, put.revision, put.entry) == ("job/c", late.modified, late)
    assert (removed.key, removed.entry) == ("job/a", None)
    assert removed.revision == late.modified + 1


async def test_a_waiting_watch_is_woken_once_per_change(adapter: Adapter) -> None:
    store = adapter.make()
    changes = store.watch("job/", after=await now(store))
    waiting = asyncio.ensure_future(take(changes, 3))
    await asyncio.sleep(0)
    for key in ("job/a", "other", "job/b", "jobs", "job/a"):
        await store.put(key, b"1")
    assert [c.key for c in await waiting] == ["job/a", "job/b", "job/a"]
    await store.put("job/last", b"1")
    assert (await anext(changes)).key == "job/last"


async def test_a_watch_misses_no_write_while_its_reader_is_busy(adapter: Adapter) -> None:
    store = adapter.make()
    before = await now(store)
    await store.put("a", b"1")
    changes = store.watch("a", after=before)
    first = await anext(changes)
    for _ in range(3):
        await store.put("a", b"1")
    rest = await take(changes, 3)
    revisions = [c.revision for c in (first, *rest)]
    assert revisions == sorted(set(revisions))


async def test_each_of_two_watchers_receives_every_change(adapter: Adapter) -> None:
    store = adapter.make()
    before = await now(store)
    watches = [asyncio.ensure_future(take(store.watch("a", after=before), 2)) for _ in range(2)]
    await asyncio.sleep(0)
    await store.put("a", b"1")
    await store.delete("a")
    one, two = await asyncio.gather(*watches)
    assert one == two
    assert [c.entry is None for c in one] == [False, True]


async def test_a_watch_yields_the_removals_by_an_expired_lease(adapter: Adapter) -> None:
    store = adapter.make()
    lease = await store.grant(adapter.ttl_s)
    last = await store.put("node/b", b"1")
    for key in ("node/b", "node/a"):
        last = await store.put(key, b"1", lease=lease)
    changes = store.watch("node/", after=last.modified)
    await adapter.pass_s(adapter.ttl_s * 2)
    await store.get("anything")
    gone = await take(changes, 2)
    assert {c.key for c in gone} == {"node/a", "node/b"}
    assert all(c.entry is None and c.revision > last.modified for c in gone)


async def test_a_watch_of_compacted_revisions_fails_and_a_list_resumes_it(adapter: Adapter) -> None:
    store = adapter.make()
    for _ in range(3):
        last = await store.put("job/a", b"1")
    await store.put("other", b"1")
    await store.delete("other")
    newest = await store.put("other", b"2")
    await adapter.compact(store, newest.modified)
    with pytest.raises(WatchCompacted):
        await anext(store.watch("job/", after=last.modified))
    listing = await store.list("job/")
    assert listing == Listing((last,), newest.modified)
    changes = store.watch("job/", after=listing.revision)
    late = await store.put("job/b", b"1")
    assert (await anext(changes)).entry == late


async def test_compaction_does_not_disturb_a_watch_that_is_up_to_date(adapter: Adapter) -> None:
    store = adapter.make()
    before = await store.put("job/a", b"1")
    changes = store.watch("job/", after=before.modified)
    waiting = asyncio.ensure_future(take(changes, 2))
    first = await store.put("job/a", b"2")
    await adapter.compact(store, first.modified)
    second = await store.put("job/a", b"3")
    assert [c.entry for c in await waiting] == [first, second]
