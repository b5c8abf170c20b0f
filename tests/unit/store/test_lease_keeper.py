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


class Fragile(MemoryStore):
    """A store whose renewals wait for `slow`, then fail with `broken`."""

    broken: Exception | None = None
    slow: asyncio.Event | None = None
    renewals = 0

    async def renew(self, lease: int) -> None:
        self.renewals += 1
        if self.slow is not None:
            await self.slow.wait()
        if self.broken is not None:
            raise self.broken
        await super().renew(lease)


class Held:
    """A keeper at work, and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Fragile(clock=self.clock)
        self.told: list[LeaseState] = []
        self.keeper = LeaseKeeper(
            self.store, ttl_s=TTL_S, on_change=self.told.append, clock=self.clock
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
    held = Held()
    keeping = await held.start()
    for i in range(1, 5):
        held.clock.now += TTL_S / 3
        await held.renewed(i)
    assert held.keeper.held()
    assert held.told == []
    keeping.cancel()


async def test_a_lease_that_is_not_renewed_in_time_is_suspect() -> None:
    held = Held()
    keeping = await held.start()
    held.store.broken = TransientError("etcd did not answer")
    held.clock.now += TTL_S * 0.9
    await held.renewed(2)
    assert held.keeper.held()
    held.clock.now = TTL_S
    assert not held.keeper.held()
    await until(lambda: held.told == [LeaseState.SUSPECT])
    keeping.cancel()


async def test_a_lease_is_suspect_while_a_renewal_hangs() -> None:
    held = Held()
    keeping = await held.start()
    held.store.slow = asyncio.Event()
    held.clock.now += TTL_S / 2
    await held.renewed(1)
    await MemoryStore.renew(held.store, held.keeper.lease)  # the request arrives at once
    held.clock.now += TTL_S
    await until(lambda: held.told == [LeaseState.SUSPECT])
    held.store.slow.set()
    await until(lambda: keeping.done())
    assert held.told == [LeaseState.SUSPECT, LeaseState.GONE]


async def test_the_deadline_counts_from_when_the_answered_request_was_sent() -> None:
    held = Held()
    keeping = await held.start()
    held.store.slow = asyncio.Event()
    held.clock.now = 1.0
    await held.renewed(1)
    held.clock.now = 2.9
    held.store.slow.set()
    await held.renewed(2)  # sent at 2.9 at once, since a third has passed since 1.0
    held.store.broken = TransientError("etcd did not answer")
    held.clock.now = 5.89
    assert held.keeper.held()
    held.clock.now = 5.9
    assert not held.keeper.held()
    keeping.cancel()


async def test_a_lease_that_outlived_an_outage_is_held_again() -> None:
    held = Held()
    keeping = await held.start()
    held.store.broken = TransientError("etcd did not answer")
    for lease in held.store._leases.values():
        lease.deadline += 100  # as etcd does when it has elected a leader
    held.clock.now = TTL_S * 2
    await until(lambda: held.told == [LeaseState.SUSPECT])
    held.store.broken = None
    await until(lambda: held.told == [LeaseState.SUSPECT, LeaseState.HELD])
    assert held.keeper.held()
    keeping.cancel()


async def test_keep_returns_when_the_lease_is_lost_and_works_with_a_new_one() -> None:
    held = Held()
    keeping = await held.start()
    first = held.keeper.lease
    await held.store.revoke(first)
    held.clock.now += TTL_S / 3
    await keeping
    assert held.told == [LeaseState.GONE]
    assert not held.keeper.held()
    keeping = await held.start()
    assert held.keeper.lease != first
    assert held.keeper.held()
    held.clock.now += TTL_S / 3
    await held.renewed(2)
    await held.keeper.revoke()
    await keeping
    with pytest.raises(LeaseLost):
        await held.store.renew(held.keeper.lease)
    assert held.told == [LeaseState.GONE]


async def test_an_error_that_cannot_be_retried_is_raised() -> None:
    held = Held()
    keeping = await held.start()
    held.store.broken = ConfigurationError("the password is wrong")
    held.clock.now += TTL_S / 3
    with pytest.raises(ConfigurationError):
        await keeping
