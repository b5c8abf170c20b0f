"""The etcd store under faults: members are killed, frozen or too few, answers are lost or late."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from elastic.errors import TransientError
from elastic.store.etcd import client
from elastic.store.etcd.connection import (
    LEASE_GRANT,
    TXN,
    Connection,
    Metadata,
    Method,
    RequestT,
    ResponseT,
)
from elastic.store.etcd.endpoints import etcd_options
from elastic.store.etcd.refusals import NO_ANSWER, Refused
from elastic.store.etcd.store import EtcdStore
from elastic.store.follow import follow
from elastic.store.interface import Change, Entry, Guard, GuardFailed, Listing, StoreWentBack
from elastic.store.lease_keeper import LeaseKeeper, LeaseState
from tests.contract.conftest import take
from tests.etcd_cluster import EtcdCluster, Member, etcd_cluster, free_ports


async def test_a_watch_loses_and_repeats_nothing_while_each_member_is_killed(
    cluster: EtcdCluster,
) -> None:
    count = 1000

    written = 0

    async def write() -> None:
        nonlocal written
        async with EtcdStore(cluster.options()) as store:
            for i in range(count):
                await store.put(f"job/{i % 7}", b"%d" % i)
                written = i

    async def kill_each() -> None:
        """Kill the members in turn amid writes, and replace each before the next is killed."""
        for i, member in enumerate(cluster.members, 1):
            while written < count * i / 4:
                await asyncio.sleep(0.01)
            member.kill()
            await asyncio.sleep(0.2)  # writes go on without it
            await asyncio.to_thread(cluster.replace, member)

    async with EtcdStore(cluster.options()) as store:
        watching = asyncio.create_task(take(store.watch("job/", after=1), count))
        await asyncio.gather(write(), kill_each())
        changes = await watching
    values = [int(c.entry.value) for c in changes if c.entry is not None]
    assert values == list(range(count))


async def test_a_watch_fails_and_follow_lists_again_when_etcd_has_lost_its_data() -> None:
    """Revisions begin at 1 again: a watch for changes after an old one would see nothing."""

    with etcd_cluster(size=1) as cluster:
        (member,) = cluster.members
        async with EtcdStore(cluster.options()) as store:
            for i in range(20):
                kept = await store.put("job/a", b"%d" % i)
            changes = store.watch("job/", after=kept.modified)
            waiting = asyncio.ensure_future(take(changes, 1))
            async with aclosing(follow(store, "job/")) as news:
                listing = await anext(news)
                assert isinstance(listing, Listing)
                assert listing.entries == (kept,)
                member.kill()
                shutil.rmtree(cluster.directory / member.name)
                await asyncio.to_thread(cluster.launch, member)
                await asyncio.to_thread(cluster.wait_healthy, member)
                with pytest.raises(StoreWentBack):
                    await waiting
                listing = await anext(news)
                assert isinstance(listing, Listing)
                assert listing.entries == ()
                now = await store.put("job/b", b"1")
                told = await anext(news)
                assert isinstance(told, Change)
                assert told.entry == now


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
async def test_a_frozen_member_stops_writes_only_for_a_moment(
    cluster: EtcdCluster, leader: bool
) -> None:
    member = next(m for m in cluster.members if m.is_leader() is leader)
    async with (
        EtcdStore(cluster.options(first=member)) as store,
        EtcdStore(cluster.options(first=member)) as watcher,
    ):
        before = await store.put("job/a", b"before")
        changes = watcher.watch("job/", after=before.modified - 1)
        assert (await anext(changes)).entry == before
        telling = asyncio.create_task(take(changes, 1))
        member.freeze()
        frozen_at = time.monotonic()
        written = await store.put("job/a", b"while frozen")
        written_after_s = time.monotonic() - frozen_at
        assert [change.entry for change in await telling] == [written]
        told_after_s = time.monotonic() - frozen_at
    print(f"written after {written_after_s:.2f} s, told after {told_after_s:.2f} s")
    assert written_after_s < 3.0
    assert told_after_s < 6.0


async def test_calls_time_out_without_a_quorum_and_work_again_when_it_returns(
    cluster: EtcdCluster,
) -> None:
    ttl_s = 2.0
    told: asyncio.Queue[LeaseState] = asyncio.Queue()
    options = dataclasses.replace(cluster.options(), total_timeout_s=3.0)
    async with EtcdStore(options) as store:
        keeper = LeaseKeeper(store, ttl_s=ttl_s, on_change=told.put_nowait)
        registered = await store.create("node/a", b"1", lease=await keeper.grant())
        keeping = asyncio.create_task(keeper.keep())
        assert registered is not None
        changes = store.watch("job/", after=registered.modified)
        waiting = asyncio.ensure_future(_entry_after_failed(changes))
        # etcd's leader steps down, and the next one gives all leases their whole time again. (A
        # leader that was frozen itself finds them expired when it is thawed.)
        stopped = [member for member in cluster.members if not member.is_leader()]
        await _freeze_and_fail(store, stopped, told, ttl_s)
        back_after_s = await _thaw_and_write(cluster, store, stopped, waiting)
        print(f"a write through {back_after_s:.2f} s after the quorum's return")
        assert await told.get() is LeaseState.HELD
        assert await store.get("node/a") == registered
        keeping.cancel()


async def _freeze_and_fail(
    store: EtcdStore, stopped: list[Member], told: asyncio.Queue[LeaseState], ttl_s: float
) -> None:
    for member in stopped:
        member.freeze()
    frozen_at = time.monotonic()
    failing = asyncio.create_task(_fails(store))
    assert await told.get() is LeaseState.SUSPECT
    noticed_after_s = time.monotonic() - frozen_at
    assert noticed_after_s < ttl_s + 0.5
    failed_after_s, error = await failing
    assert failed_after_s < 3.5
    for member in stopped:
        assert f"http://{member.address}: " in error
    print(f"suspect after {noticed_after_s:.2f} s, the call failed after {failed_after_s:.2f} s")


async def _fails(store: EtcdStore) -> tuple[float, str]:
    started_at = time.monotonic()
    with pytest.raises(TransientError, match=r"did not answer KV/\w+ within 3 s") as caught:
        await store.put("job/a", b"1")
    return time.monotonic() - started_at, str(caught.value)


async def _entry_after_failed(changes: AsyncIterator[Change]) -> Entry | None:
    """Skip entries of the failed write: a write that timed out may still happen later."""
    while True:
        entry = (await anext(changes)).entry
        if entry is None or entry.value != b"1":
            return entry


async def _thaw_and_write(
    cluster: EtcdCluster,
    store: EtcdStore,
    stopped: list[Member],
    waiting: asyncio.Future[Entry | None],
) -> float:
    for member in stopped:
        member.thaw()
    await asyncio.to_thread(cluster.wait_healthy, *cluster.members)
    healthy_at = time.monotonic()
    written = await store.put("job/a", b"2")
    assert await waiting == written
    return time.monotonic() - healthy_at


class ForgetfulConnection(Connection):
    """Loses the first answer to each method in `loses`, after the member has carried it out."""

    loses = frozenset({TXN.name, LEASE_GRANT.name})

    async def ask(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        metadata: Metadata,
        timeout_s: float,
    ) -> ResponseT:
        answer = await super().ask(method, request, metadata=metadata, timeout_s=timeout_s)
        if method.name in self.loses:
            self.loses -= {method.name}
            raise Refused(NO_ANSWER)
        return answer


async def test_a_write_whose_answer_was_lost_happens_once(
    shared_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Connection", ForgetfulConnection)
    one = shared_cluster.options("lost/", first=shared_cluster.members[0])
    options = dataclasses.replace(one, endpoints=one.endpoints[:1])

    async def created() -> None:
        async with EtcdStore(options) as store:
            entry = await store.create("leader", b"me")
            assert entry is not None
            assert (entry.value, entry.created) == (b"me", entry.modified)
            assert await store.create("leader", b"me") is None

    async def put() -> None:
        async with EtcdStore(options) as store:
            before = await store.get("leader")
            assert before is not None
            for _ in range(2):
                entry = await store.put("leader", b"me")
                assert entry.modified == before.modified + 1
                before = entry

    async def deleted() -> None:
        async with EtcdStore(options) as store:
            assert await store.delete("leader")
            assert not await store.delete("leader")

    async def granted() -> None:
        async with EtcdStore(options) as store:
            await store.renew(await store.grant(1.0))

    for check in (created, put, deleted, granted):
        await check()


async def test_a_refused_write_stays_refused_when_its_answer_was_lost(
    shared_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Connection", ForgetfulConnection)
    async with (
        EtcdStore(shared_cluster.options("first/")) as store,
        EtcdStore(shared_cluster.options("first/")) as other,
    ):
        assert await other.create("leader", b"other") is not None
        assert await store.create("leader", b"me") is None
        leader = await other.get("leader")
        assert leader is not None
        await other.delete("leader")
        with pytest.raises(GuardFailed):
            await store.put("a", b"1", guard=Guard(key="leader", created=leader.created))
        assert await store.get("a") is None


class LateConnection(Connection):
    """Holds back the first transaction until `kept` is called, as a frozen member's socket does."""

    kept: Callable[[], Awaitable[object]] | None = None

    async def ask(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        metadata: Metadata,
        timeout_s: float,
    ) -> ResponseT:
        ask = functools.partial(
            super().ask, method, request, metadata=metadata, timeout_s=timeout_s
        )
        if method is TXN and LateConnection.kept is None:
            LateConnection.kept = ask
            raise Refused(NO_ANSWER)
        return await ask()


@pytest.mark.parametrize("deletes", [False, True], ids=["put", "delete"])
async def test_a_write_that_arrives_late_changes_nothing(
    shared_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    monkeypatch.setattr(client, "Connection", LateConnection)
    monkeypatch.setattr(LateConnection, "kept", None)
    async with EtcdStore(shared_cluster.options()) as store:
        monkeypatch.setattr(LateConnection, "kept", lambda: None)
        await store.put("late", b"before")
        monkeypatch.setattr(LateConnection, "kept", None)
        await (store.delete("late") if deletes else store.put("late", b"older"))
        newer = await store.put("late", b"newer")
        assert LateConnection.kept is not None
        await LateConnection.kept()
        assert await store.get("late") == newer


async def test_unreachable_members_are_named_one_by_one() -> None:
    endpoints = [f"http://127.0.0.1:{port}" for port in free_ports(3)]
    options = dataclasses.replace(etcd_options(",".join(endpoints)), total_timeout_s=0.5)
    async with EtcdStore(options) as store:
        with pytest.raises(TransientError) as caught:
            await store.get("a")
    for endpoint in endpoints:
        assert f"{endpoint}: Failed to connect" in str(caught.value)
