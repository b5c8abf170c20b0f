"""One candidate after the other leads, and each is told of changes of its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from elastic.coordinator.leadership import Election, Leadership, begin_term, save_generation
from elastic.core.membership import ChangeReason, Generation
from elastic.store.interface import Change, Entry, WatchCompacted
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import Leader, find_leader
from elastic.store.lease_keeper import LeaseState
from tests.unit.store.failing_store import Clock, FailingStore
from tests.waiting import until

KEYS = JobKeys("job")
TTL_S = 3.0
HELD, SUSPECT, GONE = LeaseState.HELD, LeaseState.SUSPECT, LeaseState.GONE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lease keepers look at the clock a hundred times as often."""
    monkeypatch.setattr("elastic.store.lease_keeper._LOOKS_PER_TTL", 2000)


class Candidate:
    """A candidate that shares the store's clock, which only the test moves."""

    def __init__(self, store: FailingStore, address: str, clock: Clock) -> None:
        self.told: list[LeaseState] = []
        self.election = Election(
            store,
            job="job",
            address=address,
            on_change=self.told.append,
            ttl_s=TTL_S,
            clock=clock,
        )

    def campaign(self, *, after_s: float = 0.0) -> asyncio.Task[Leadership]:
        return asyncio.create_task(self.election.campaign(after_s=after_s))

    async def until_told(self, *states: LeaseState) -> None:
        await until(lambda: self.told == list(states))


class Contest:
    """Two candidates; after `start` the first one leads and keeps its lease."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = FailingStore(self.clock)
        self.one = Candidate(self.store, "one:1", self.clock)
        self.two = Candidate(self.store, "two:1", self.clock)

    async def start(self) -> Leadership:
        leadership = await self.one.election.campaign()
        self.holding = asyncio.create_task(self.one.election.hold())
        return leadership

    async def leader(self) -> Leader | None:
        return await find_leader(self.store, job="job")


async def test_the_second_candidate_leads_when_the_first_resigns() -> None:
    contest = Contest()
    first = await contest.start()
    assert contest.one.election.held()
    campaigning = contest.two.campaign()
    generation = Generation(
        number=3, incarnation=first.incarnation, members=(), reason=ChangeReason.STARTED
    )
    await save_generation(contest.store, first, generation)
    assert await contest.leader() == Leader(address="one:1", term=first.guard.created)
    assert not campaigning.done()
    await contest.one.election.resign()
    second = await campaigning
    assert await contest.leader() == Leader(address="two:1", term=second.guard.created)
    assert second.guard.created > first.guard.created
    assert second.incarnation == first.incarnation
    assert second.last_generation == generation
    await contest.holding
    assert not contest.one.election.held()
    assert contest.one.told == []
    await contest.two.election.resign()
    assert (await contest.one.election.campaign()).last_number == 3


async def test_a_candidate_lets_others_go_first_and_leads_if_there_are_none() -> None:
    contest = Contest()
    await contest.start()
    await contest.one.election.resign()
    polite, other = contest.one.campaign(after_s=0.1), contest.two.campaign()
    await other
    await contest.two.election.resign()
    await polite


async def test_an_outage_that_the_lease_outlives_does_not_depose_the_leader() -> None:
    contest = Contest()
    first = await contest.start()
    campaigning = contest.two.campaign()
    contest.store.refuses["renew"] = 10**9
    for lease in contest.store._leases.values():
        lease.deadline += 100  # as etcd does when it has elected a leader
    contest.clock.now += TTL_S
    await contest.one.until_told(SUSPECT)
    assert not contest.one.election.held()
    contest.store.refuses["renew"] = 0
    await contest.one.until_told(SUSPECT, HELD)
    assert contest.one.election.held()
    assert not campaigning.done()
    leader = await contest.leader()
    assert leader is not None
    assert leader.term == first.guard.created


async def test_a_leader_that_lost_its_lease_is_deposed_and_may_campaign_again() -> None:
    contest = Contest()
    await contest.start()
    campaigning = contest.two.campaign()
    contest.store.hangs["renew"] = asyncio.Event()
    contest.clock.now += TTL_S
    await contest.store.get("anything")  # makes the store look at its clock
    second = await campaigning
    await contest.holding
    assert contest.one.told in ([GONE], [SUSPECT, GONE])
    assert not contest.one.election.held()
    contest.store.hangs.clear()
    again = contest.one.campaign()
    await contest.two.election.resign()
    assert (await again).guard.created > second.guard.created


async def test_a_leader_whose_election_key_is_deleted_is_deposed() -> None:
    contest = Contest()
    first = await contest.start()
    await contest.store.delete(KEYS.leader)
    await contest.holding
    assert contest.one.told == [GONE]
    assert not contest.one.election.held()
    assert contest.store._leases == {}
    assert (await contest.one.election.campaign()).guard.created > first.guard.created


async def test_a_candidate_leads_at_once_though_the_answer_to_its_create_was_lost() -> None:
    contest = Contest()
    contest.store.loses["create"] = 1
    leadership = await contest.start()
    entry = await contest.store.get(KEYS.leader)
    assert isinstance(entry, Entry)
    assert leadership.guard.created == entry.created == entry.modified == 1


async def test_a_candidate_waits_out_an_outage_of_the_store() -> None:
    contest = Contest()
    for method in ("list", "grant", "create", "get"):
        contest.store.refuses[method] = 2
    await contest.start()
    assert contest.one.told == []


async def test_a_candidate_that_is_deposed_before_its_term_begins_campaigns_again() -> None:
    contest = Contest()
    contest.store.hangs["get"] = asyncio.Event()  # the read of the generation hangs
    campaigning = contest.one.campaign()
    await until(lambda: KEYS.leader in contest.store._entries)
    first = contest.store._entries[KEYS.leader]
    await contest.store.delete(KEYS.leader)
    await until(lambda: contest.store._entries.get(KEYS.leader, first).created > first.created)
    contest.store.hangs["get"].set()
    leadership = await campaigning
    assert leadership.guard.created == contest.store._entries[KEYS.leader].created
    assert contest.one.told == []
    assert contest.one.election.held()


async def test_a_candidate_that_is_deposed_as_its_term_begins_campaigns_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contest, moments = Contest(), 0

    async def taken_in_that_moment(
        store: FailingStore, *, elected: Entry, **named: str
    ) -> Leadership:
        nonlocal moments
        moments += 1
        leadership = await begin_term(store, elected=elected, **named)
        if moments == 1:
            await store.revoke(elected.lease)
            contest.one.election._claim._lease_changed(GONE)
        return leadership

    monkeypatch.setattr("elastic.coordinator.leadership.begin_term", taken_in_that_moment)

    leadership = await contest.one.election.campaign()
    assert moments == 2
    assert contest.one.told == []
    assert contest.one.election.held()
    entry = await contest.store.get(KEYS.leader)
    assert entry is not None
    assert leadership.guard.created == entry.created


async def test_a_leader_whose_lease_is_in_doubt_from_the_begin_is_told_so() -> None:
    contest = Contest()
    contest.store.hangs["get"] = asyncio.Event()
    campaigning = contest.one.campaign()
    await until(lambda: KEYS.leader in contest.store._entries)
    contest.store.refuses["renew"] = 10**9
    for lease in contest.store._leases.values():
        lease.deadline += 100
    contest.clock.now += TTL_S
    contest.store.hangs["get"].set()
    await campaigning
    assert contest.one.told == [SUSPECT]


async def test_resigning_does_not_wait_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.store.claim._FAREWELL_S", 0.05)
    contest = Contest()
    await contest.start()
    contest.store.hangs["revoke"] = asyncio.Event()
    await contest.one.election.resign()
    await contest.holding
    assert contest.one.told == []
    assert not contest.one.election.held()


async def test_a_leader_that_is_listed_again_is_watched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second watch would not know that somebody was there, so it would not notice the end."""
    contest, watched, listed = Contest(), list[str](), asyncio.Event()
    await contest.start()
    follow, forgets = contest.store.watch, asyncio.Event()

    async def watch_process(address: str) -> None:
        watched.append(address)
        await asyncio.Future()

    async def watch(prefix: str, *, after: int) -> AsyncIterator[Change]:
        if not forgets.is_set():
            await forgets.wait()
            raise WatchCompacted("too old")
        listed.set()
        async for change in follow(prefix, after=after):
            yield change

    monkeypatch.setattr("elastic.coordinator.leadership.wait_until_gone", watch_process)
    monkeypatch.setattr(contest.store, "watch", watch)
    campaigning = contest.two.campaign()
    await until(lambda: watched == ["one:1"])
    forgets.set()
    await listed.wait()
    assert watched == ["one:1"]
    await contest.one.election.resign()
    await campaigning
    await contest.two.election.resign()
