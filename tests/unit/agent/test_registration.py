"""An agent's registration outlasts failures of the store, and the agent is told how it stands."""

from __future__ import annotations

import asyncio

import pytest

from elastic.agent.registration import Registration
from elastic.store.job_documents import NodeDocument
from elastic.store.job_keys import JobKeys
from elastic.store.lease_keeper import LeaseState
from tests.unit.store.failing_store import Clock, FailingStore
from tests.waiting import until

KEY = JobKeys("job").node("n1")
TTL_S = 3.0
HELD, SUSPECT, GONE = LeaseState.HELD, LeaseState.SUSPECT, LeaseState.GONE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lease keepers look at the clock a hundred times as often."""
    monkeypatch.setattr("elastic.store.lease_keeper._LOOKS_PER_TTL", 2000)


class Node:
    """A node that shares the store's clock, which only the test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = FailingStore(self.clock)
        self.told: list[LeaseState] = []
        self.registration = Registration(
            self.store,
            job="job",
            node="n1",
            document=NodeDocument(
                start_token="t",
                host="h",
                slots=1,
                version="1",
                command_digest="d",
                started_unix_s=0.0,
            ),
            on_change=self.told.append,
            ttl_s=TTL_S,
            clock=self.clock,
        )

    async def start(self) -> asyncio.Task[None]:
        await self.registration.register()
        return asyncio.create_task(self.registration.keep())

    def extend_leases(self) -> None:
        """Extend all leases, as etcd does when it has elected a leader."""
        for lease in self.store._leases.values():
            lease.deadline += 100

    async def until_told(self, *states: LeaseState) -> None:
        await until(lambda: self.told == list(states))


async def test_registering_waits_out_an_outage_of_the_store() -> None:
    node = Node()
    for method in ("list", "grant", "create", "get"):
        node.store.refuses[method] = 2
    await node.start()
    assert node.told == [HELD]
    assert node.registration.held()
    await node.registration.close()


async def test_a_registration_that_is_in_doubt_for_a_while_knows_its_last_renewal() -> None:
    node = Node()
    await node.start()
    node.extend_leases()
    node.store.refuses["renew"] = 10**9
    node.clock.now += TTL_S
    await node.until_told(HELD, SUSPECT)
    assert not node.registration.held()
    assert node.registration.renewed_at_s == 0.0
    node.store.refuses["renew"] = 0
    await node.until_told(HELD, SUSPECT, HELD)
    assert node.registration.renewed_at_s == TTL_S
    await node.registration.close()


async def test_the_grant_of_a_lease_without_a_name_is_no_sign_of_being_registered() -> None:
    """Others count from the loss of the name, however often this node asks for another lease."""
    node = Node()
    node.clock.now = 50.0
    node.store.refuses["create"] = node.store.refuses["get"] = 10**9
    starting = asyncio.create_task(node.start())
    await until(lambda: node.registration._claim.renewed_at_s == 50.0)
    assert node.registration.renewed_at_s == 0.0
    starting.cancel()


async def test_a_registration_may_be_in_doubt_from_the_begin_and_this_is_reported() -> None:
    node = Node()
    node.store.hangs["answer to create"] = asyncio.Event()
    starting = asyncio.create_task(node.start())
    await until(lambda: KEY in node.store._entries)
    node.extend_leases()
    node.store.refuses["renew"] = 10**9
    node.clock.now += TTL_S
    node.store.hangs.pop("answer to create").set()
    await starting
    assert node.told == [HELD, SUSPECT]
    await node.registration.close()


async def test_a_node_that_is_cut_off_for_too_long_registers_again_when_it_can() -> None:
    node = Node()
    await node.start()
    node.store.refuses["renew"] = node.store.refuses["list"] = 10**9
    node.clock.now += TTL_S
    await node.until_told(HELD, SUSPECT)
    assert await node.store.get(KEY) is None
    node.store.refuses.clear()
    await node.until_told(HELD, SUSPECT, GONE, HELD)
    assert await node.store.get(KEY) is not None
    await node.registration.close()


async def test_closing_does_not_wait_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.store.claim._FAREWELL_S", 0.05)
    node = Node()
    keeping = await node.start()
    for method in ("put", "revoke"):
        node.store.hangs[method] = asyncio.Event()
    await node.registration.close()
    await keeping
    assert node.told == [HELD]


async def test_a_registration_that_is_closed_while_it_waits_is_never_made() -> None:
    node = Node()
    node.store.refuses["grant"] = 10**9
    registering = asyncio.create_task(node.registration.register())
    await until(lambda: node.store.refuses["grant"] < 10**9)
    await node.registration.close()
    node.store.refuses.clear()
    await registering
    assert node.told == []
    assert await node.store.get(KEY) is None
