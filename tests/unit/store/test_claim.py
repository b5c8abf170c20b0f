"""One of several claims takes a key, and can release it at any time."""

from __future__ import annotations

import asyncio

import pytest

from elastic.store.claim import Claim
from elastic.store.lease_keeper import LeaseState
from tests.unit.store.failing_store import Clock, FailingStore
from tests.waiting import until

KEY = "name"


class Claims:
    def __init__(self) -> None:
        self.clock = Clock()
        self.store = FailingStore(self.clock)
        self.told: list[LeaseState] = []

    def make(self) -> Claim:
        return Claim(self.store, key=KEY, ttl_s=3.0, on_change=self.told.append, clock=self.clock)


async def test_one_of_several_claims_takes_the_key_and_the_others_leave_no_lease() -> None:
    claims = Claims()
    contestants = [claims.make() for _ in range(4)]
    taken = await asyncio.gather(*(claim.take(b"%d" % i) for i, claim in enumerate(contestants)))
    (winner,) = [i for i, entry in enumerate(taken) if entry is not None]
    assert await claims.store.get(KEY) == taken[winner]
    assert [claim.held() for claim in contestants] == [i == winner for i in range(4)]
    assert len(claims.store._leases) == 1
    await contestants[winner].release()
    assert claims.store._leases == {}
    assert await claims.store.get(KEY) is None
    assert claims.told == []


async def test_the_same_value_under_another_lease_is_not_ours() -> None:
    claims = Claims()
    one, two = claims.make(), claims.make()
    assert await one.take(b"same") is not None
    assert await two.take(b"same") is None
    await one.release()


@pytest.mark.parametrize("method", ["grant", "create", "answer to create"])
async def test_a_claim_released_while_it_is_being_taken_leaves_nothing(method: str) -> None:
    claims = Claims()
    claims.store.hangs[method] = asyncio.Event()
    claim = claims.make()
    taking = asyncio.create_task(claim.take(b"1"))
    await asyncio.sleep(0.05)
    await claim.release()
    revision = claims.store._revision
    claims.store.hangs.pop(method).set()
    assert await taking is None
    assert claims.store._revision == revision
    assert not claim.held()
    assert await claims.store.get(KEY) is None
    assert claims.store._leases == {}


async def test_last_words_of_the_holder_only_are_seen_before_the_key_goes() -> None:
    claims = Claims()
    one, two = claims.make(), claims.make()
    mine = await one.take(b"1")
    assert mine is not None
    changes = claims.store.watch(KEY, after=mine.modified)
    await one.release(last_words=b"bye")
    said, gone = await anext(changes), await anext(changes)
    assert said.entry is not None
    assert said.entry.value == b"bye"
    assert gone.entry is None
    taken = await two.take(b"2")
    await one.release(last_words=b"bye again")
    assert await claims.store.get(KEY) == taken
    await two.release()


async def test_a_key_is_taken_over_only_if_it_is_the_known_one() -> None:
    claims = Claims()
    one, two, three = (claims.make() for _ in range(3))
    known = await one.take(b"1")
    taken = await two.take(b"2", over=known)
    assert known is not None
    assert taken is not None
    assert taken.created == known.created
    await one.hold()  # returns, since the first claim has lost the key
    assert claims.told == [LeaseState.GONE]
    assert await claims.store.get(KEY) == taken
    await two.release()
    assert await three.take(b"3", over=known) is None


async def test_a_lease_lost_in_an_outage_takes_the_claim_with_it() -> None:
    claims = Claims()
    claims.store.refuses["create"] = 10**9
    claim = claims.make()
    taking = asyncio.create_task(claim.take(b"1"))
    await until(lambda: claims.store.refuses["create"] < 10**9)
    claims.clock.now += 4.0
    claims.store.refuses["create"] = 0
    assert await taking is None
    assert claims.told == []
    assert await claim.take(b"1") is not None
    await claim.release()
