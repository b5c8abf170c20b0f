"""Whoever was not connected hears of the job's end from the store, of this one and no earlier."""

from __future__ import annotations

import asyncio

import pytest

from elastic.coordinator.leadership import Leadership, lead, save_generation
from elastic.core.membership import ChangeReason, Generation
from elastic.store.interface import GuardFailed, Store
from elastic.store.job_end import JobEnds, announce_end
from elastic.store.job_keys import JobKeys
from tests.contract.conftest import Adapter, within_deadline

KEYS = JobKeys("job")


async def ended(store: Store, leadership: Leadership, exit_code: int) -> None:
    await announce_end(store, job="job", guard=leadership.guard, exit_code=exit_code)


async def listener(store: Store, job: str = "job") -> JobEnds:
    ends = JobEnds(store, job=job)
    await ends.start()
    return ends


@pytest.mark.parametrize("exit_code", [0, 143])
def test_the_end_is_heard_by_all_who_listen(adapter: Adapter, exit_code: int) -> None:
    async def check() -> None:
        store = adapter.make()
        leadership = await lead(store, job="job", candidate="c")
        ends = [await listener(store) for _ in range(2)]
        waiting = [asyncio.create_task(e.next_end()) for e in ends]
        await ended(store, leadership, exit_code)
        assert await asyncio.gather(*waiting) == [exit_code, exit_code]

    within_deadline(check())


def test_an_end_before_one_listens_is_past_and_one_before_one_waits_is_not(
    adapter: Adapter,
) -> None:
    async def check() -> None:
        store = adapter.make()
        leadership = await lead(store, job="job", candidate="c")
        await ended(store, leadership, 1)
        ends = await listener(store)
        waiting = asyncio.create_task(ends.next_end())
        other = JobEnds(store, job="other")
        await other.start()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await ended(store, leadership, 2)
        assert await waiting == 2
        assert await ends.next_end() == 2

    within_deadline(check())


def test_what_is_not_this_jobs_end(adapter: Adapter) -> None:
    async def check() -> None:
        store = adapter.make()
        waiting = asyncio.create_task((await listener(store)).next_end())
        await store.put(f"{KEYS.ended}-of-what", b'{"exit_code": 1}')
        await store.put(JobKeys("job2").ended, b'{"exit_code": 1}')
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await store.put(KEYS.ended, b"no number")
        assert await waiting == 1

    within_deadline(check())


def test_the_next_job_of_the_name_begins_anew(adapter: Adapter) -> None:
    async def check() -> None:
        store = adapter.make()
        leadership = await lead(store, job="job", candidate="first")
        generation = Generation(
            number=7, incarnation="first", members=(), reason=ChangeReason.STARTED
        )
        await save_generation(store, leadership, generation)
        await ended(store, leadership, 0)
        await store.delete(KEYS.leader)
        again = await lead(store, job="job", candidate="second")
        assert (again.incarnation, again.last) == ("second", None)

    within_deadline(check())


def test_a_deposed_leader_ends_no_job(adapter: Adapter) -> None:
    async def check() -> None:
        store = adapter.make()
        deposed = await lead(store, job="job", candidate="first")
        await store.delete(KEYS.leader)
        await lead(store, job="job", candidate="second")
        with pytest.raises(GuardFailed):
            await ended(store, deposed, 1)
        assert await store.get(KEYS.ended) is None
        assert await store.get(KEYS.incarnation) is not None

    within_deadline(check())
