"""A lease is renewed, and its holder is told when it is suspect, held again or gone."""

from __future__ import annotations

import asyncio

import pytest

from elastic.errors import ConfigurationError, TransientError
from elastic.store.interface import LeaseLost
from elastic.store.lease_keeper import LeaseKeeper, LeaseState
from elastic.store.memory import MemoryStore
from tests.unit.store.failing_store import Clock
from tests.waiting import until

TTL_S = 3.0


class FailingRenewals(MemoryStore):
    """A store whose renewals wait for `released`, then fail with `failure`."""

    failure: Exception | None = None
    released: asyncio.Event | None = None
    renewals = 0

    async def renew(self, lease: int) -> None:
        self.renewals += 1
        if self.released is not None:
            await self.released.wait()
        if self.failure is not None:
            raise self.failure
        await super().renew(lease)


class RunningKeeper:
    """A keeper at work, and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = FailingRenewals(clock=self.clock)
        self.states: list[LeaseState] = []
        self.keeper = LeaseKeeper(
            self.store, ttl_s=TTL_S, on_change=self.states.append, clock=self.clock
        )

    async def start(self) -> asyncio.Task[None]:
        await self.keeper.grant()
        return asyncio.create_task(self.keeper.keep())

    async def renewed(self, times: int) -> None:
        await until(lambda: self.store.renewals >= times)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper looks at the clock a hundred times as often."""
    monkeypatch.setattr("elastic.store.lease_keeper._LOOKS_PER_TTL", 2000)


async def test_a_lease_is_renewed_every_third_of_its_time() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    for i in range(1, 5):
        running.clock.now += TTL_S / 3
        await running.renewed(i)
    assert running.keeper.held()
    assert running.states == []
    keeping.cancel()


async def test_a_lease_that_is_not_renewed_in_time_is_suspect() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    running.store.failure = TransientError("etcd did not answer")
    running.clock.now += TTL_S * 0.9
    await running.renewed(2)
    assert running.keeper.held()
    running.clock.now = TTL_S
    assert not running.keeper.held()
    await until(lambda: running.states == [LeaseState.SUSPECT])
    keeping.cancel()


async def test_a_lease_is_suspect_while_a_renewal_hangs() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    running.store.released = asyncio.Event()
    running.clock.now += TTL_S / 2
    await running.renewed(1)
    await MemoryStore.renew(running.store, running.keeper.lease)  # the request arrives at once
    running.clock.now += TTL_S
    await until(lambda: running.states == [LeaseState.SUSPECT])
    running.store.released.set()
    await until(lambda: keeping.done())
    assert running.states == [LeaseState.SUSPECT, LeaseState.GONE]


async def test_the_deadline_counts_from_when_the_answered_request_was_sent() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    running.store.released = asyncio.Event()
    running.clock.now = 1.0
    await running.renewed(1)
    running.clock.now = 2.9
    running.store.released.set()
    await running.renewed(2)  # sent at 2.9 at once, since a third has passed since 1.0
    running.store.failure = TransientError("etcd did not answer")
    running.clock.now = 5.89
    assert running.keeper.held()
    running.clock.now = 5.9
    assert not running.keeper.held()
    keeping.cancel()


async def test_a_lease_that_outlived_an_outage_is_held_again() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    running.store.failure = TransientError("etcd did not answer")
    for lease in running.store._leases.values():
        lease.deadline += 100  # as etcd does when it has elected a leader
    running.clock.now = TTL_S * 2
    await until(lambda: running.states == [LeaseState.SUSPECT])
    running.store.failure = None
    await until(lambda: running.states == [LeaseState.SUSPECT, LeaseState.HELD])
    assert running.keeper.held()
    keeping.cancel()


async def test_keep_returns_when_the_lease_is_lost_and_works_with_a_new_one() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    first = running.keeper.lease
    await running.store.revoke(first)
    running.clock.now += TTL_S / 3
    await keeping
    assert running.states == [LeaseState.GONE]
    assert not running.keeper.held()
    keeping = await running.start()
    assert running.keeper.lease != first
    assert running.keeper.held()
    running.clock.now += TTL_S / 3
    await running.renewed(2)
    await running.keeper.revoke()
    await keeping
    with pytest.raises(LeaseLost):
        await running.store.renew(running.keeper.lease)
    assert running.states == [LeaseState.GONE]


async def test_an_error_that_cannot_be_retried_is_raised() -> None:
    running = RunningKeeper()
    keeping = await running.start()
    running.store.failure = ConfigurationError("the password is wrong")
    running.clock.now += TTL_S / 3
    with pytest.raises(ConfigurationError):
        await keeping
