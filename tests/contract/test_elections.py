"""Candidates are killed, frozen and cut off; agents find the new leader."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

from elastic.coordinator.leadership import Election, Leadership, load_generation, save_generation
from elastic.core.membership import ChangeReason, Generation
from elastic.store.etcd.store import EtcdStore
from elastic.store.interface import Store
from elastic.store.leader_watch import Leader, LeaderWatch
from elastic.store.lease_keeper import LeaseState
from tests.etcd_cluster import EtcdCluster

TTL_S = 2.0
DEADLINE_S = 60.0
HELD, SUSPECT, GONE = LeaseState.HELD, LeaseState.SUSPECT, LeaseState.GONE


class Candidate:
    """A process of tests/contract/candidate.py."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()


@contextlib.asynccontextmanager
async def candidate(
    cluster: EtcdCluster, job: str, address: str, ttl_s: float = TTL_S
) -> AsyncIterator[Candidate]:
    arguments = [cluster.endpoints(), job, address, str(ttl_s)]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "tests.contract.candidate", *arguments], stdin=PIPE, stdout=PIPE
    )
    try:
        started = Candidate(process)
        assert await started.line() == "READY"
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def leader_watch(store: Store, job: str) -> AsyncIterator[LeaderWatch]:
    watch = LeaderWatch(store, job=job)
    running = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_follower_leads_and_is_found_after_the_leader_is_killed(
    shared_cluster: EtcdCluster,
) -> None:
    job = str(uuid.uuid4())
    async with (
        EtcdStore(shared_cluster.options()) as store,
        leader_watch(store, job) as watch,
        candidate(shared_cluster, job, "one:1") as one,
    ):
        word, incarnation, last = (await one.line()).split()
        assert (word, last) == ("LEADS", "0")
        first = await watch.newer()
        assert first.address == "one:1"
        one.tell("save 7")
        assert await one.line() == "SAVED 7"
        async with candidate(shared_cluster, job, "two:1") as two:
            killed_at = time.monotonic()
            one.signal(signal.SIGKILL)
            assert await two.line() == f"LEADS {incarnation} 7"
            led_after_s = time.monotonic() - killed_at
            second = await watch.newer(first)
            assert second.address == "two:1"
            assert second.term > first.term
            two.tell("save 8")
            assert await two.line() == "SAVED 8"
    print(f"the next one led {led_after_s:.2f} s after the kill (lease: {TTL_S} s)")
    assert led_after_s < TTL_S + 8.0


async def test_a_leader_that_was_stopped_beyond_its_lease_cannot_write(
    shared_cluster: EtcdCluster,
) -> None:
    job = str(uuid.uuid4())
    async with (
        EtcdStore(shared_cluster.options()) as store,
        candidate(shared_cluster, job, "one:1") as one,
    ):
        leads = await one.line()
        async with candidate(shared_cluster, job, "two:1") as two:
            one.signal(signal.SIGSTOP)
            assert await two.line() == leads
            one.tell("save 1")
            two.tell("save 2")
            assert await two.line() == "SAVED 2"
            one.signal(signal.SIGCONT)
            heard = {await one.line()}
            while not heard >= {"REFUSED 1", "GONE"}:
                heard.add(await one.line())
            assert heard - {"SUSPECT"} == {"REFUSED 1", "GONE"}
            stored = await load_generation(store, job)
            assert stored is not None
            assert stored.generation.number == 2
            # The deposed leader campaigns again, and leads at once when the other resigns.
            two.tell("resign")
            assert await two.line() == "RESIGNED"
            assert await one.line() == f"{leads.rpartition(' ')[0]} 2"


async def test_the_next_leads_at_once_when_the_leader_resigns(shared_cluster: EtcdCluster) -> None:
    job, long_s = str(uuid.uuid4()), 600.0
    async with (
        EtcdStore(shared_cluster.options()) as store,
        leader_watch(store, job) as watch,
        candidate(shared_cluster, job, "one:1", long_s) as one,
    ):
        leads = await one.line()
        first = await watch.newer()
        async with candidate(shared_cluster, job, "two:1", long_s) as two:
            resigned_at = time.monotonic()
            one.tell("resign")
            assert await one.line() == "RESIGNED"
            assert await two.line() == leads
            assert (await watch.newer(first)).address == "two:1"
            print(f"handed over within {time.monotonic() - resigned_at:.2f} s")


class Contestant:
    """A candidate in this process, with a store of its own."""

    def __init__(self, store: Store, address: str) -> None:
        self.store = store
        self.told: asyncio.Queue[LeaseState] = asyncio.Queue()
        self.election = Election(
            store, job="job", address=address, on_change=self.told.put_nowait, ttl_s=TTL_S
        )


async def test_a_loss_of_quorum_changes_no_leader(cluster: EtcdCluster) -> None:
    async with (
        EtcdStore(cluster.options()) as a,
        EtcdStore(cluster.options()) as b,
        leader_watch(b, "job") as watch,
    ):
        one, two = Contestant(a, "one:1"), Contestant(b, "two:1")
        leadership = await one.election.campaign()
        holding = asyncio.create_task(one.election.hold())
        campaigning = asyncio.create_task(two.election.campaign())
        leader = await watch.newer()
        assert leader == Leader(address="one:1", term=leadership.guard.created)
        await _outage(cluster, one, leadership)
        assert not campaigning.done()
        assert (watch.leader, watch.vacant) == (leader, False)
        assert not holding.done()
        await one.election.resign()
        second = await campaigning
        assert second.last_number == 1
        assert (await watch.newer(leader)).address == "two:1"
        await two.election.resign()


async def _outage(cluster: EtcdCluster, leading: Contestant, leadership: Leadership) -> None:
    """Take the quorum away for longer than a lease. A write begun meanwhile succeeds afterwards."""
    # etcd's own leader is not frozen: it would find the leases expired when it is thawed.
    stopped = [member for member in cluster.members if not member.is_leader()]
    for member in stopped:
        member.freeze()
    generation = Generation(
        number=1, incarnation=leadership.incarnation, members=(), reason=ChangeReason.STARTED
    )
    saving = asyncio.create_task(save_generation(leading.store, leadership, generation))
    assert await leading.told.get() is SUSPECT
    assert not leading.election.held()
    await asyncio.sleep(TTL_S)
    for member in stopped:
        member.thaw()
    assert await leading.told.get() is HELD
    await saving
    assert leading.told.empty()
