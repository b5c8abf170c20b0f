"""Listening for the job's end goes on through outages. What else it does: tests/contract."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given

from elastic.store.job_end import JobEnds
from elastic.store.job_keys import JobKeys
from tests.contract.conftest import within_deadline
from tests.fuzzed_documents import documents, thoroughly
from tests.unit.store.failing_store import Clock, FailingStore

KEY = JobKeys("job").ended


def test_an_outage_is_sat_out() -> None:
    async def check() -> None:
        store = FailingStore(Clock())
        await store.put(KEY, b'{"exit_code": 1}')
        ends = JobEnds(store, job="job")
        store.refuses["get"] = 2
        await ends.start()
        assert store.refuses["get"] == 0
        store.refuses["list"] = 2
        waiting = asyncio.create_task(ends.next_end())
        while store.refuses["list"]:
            await asyncio.sleep(0.01)
        await store.put(KEY, b'{"exit_code": 2}')
        assert await waiting == 2

    within_deadline(check())


@thoroughly
@given(value=documents(json.dumps({"exit_code": 78}).encode()))
def test_whatever_is_said_of_the_end_is_an_exit_code(value: bytes) -> None:
    async def check() -> None:
        store = FailingStore(Clock())
        ends = JobEnds(store, job="job")
        await ends.start()
        await store.put(KEY, value)
        assert 0 <= await ends.next_end() <= 255

    within_deadline(check())
