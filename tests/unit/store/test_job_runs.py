"""Waiting for a run's end outlasts outages. tests/contract has the other tests of job_runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from hypothesis import given

from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import AlreadyEnded, RunEnd, RunEnds, list_runs
from tests.fuzzed_documents import documents, thoroughly
from tests.unit.store.failing_store import Clock, FailingStore

KEY = JobKeys("job").end("default")
LEFT = RunEnd(run_id="default", exit_code=143, ended_unix_s=1.0, left=True)
ENDED = dataclasses.replace(LEFT, exit_code=82, left=False)


def to_json(end: RunEnd) -> bytes:
    return json.dumps(dataclasses.asdict(end)).encode()


async def test_waiting_for_the_end_of_a_run_outlasts_an_outage() -> None:
    store = FailingStore(Clock())
    await store.put(KEY, to_json(LEFT))
    ends = RunEnds(store, job="job", run_id="default")
    store.refuses["get"] = 2
    await ends.start()
    assert store.refuses["get"] == 0
    store.refuses["list"] = 2
    waiting = asyncio.create_task(ends.next_end())
    while store.refuses["list"]:
        await asyncio.sleep(0.01)
    await store.put(KEY, to_json(ENDED))
    assert await waiting == ENDED


async def test_next_end_called_again_waits_for_the_following_end() -> None:
    store = FailingStore(Clock())
    ends = RunEnds(store, job="job", run_id="default")
    await ends.start()
    await store.put(KEY, to_json(LEFT))
    assert await ends.next_end() == LEFT
    waiting = asyncio.create_task(ends.next_end())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.put(KEY, to_json(ENDED))
    assert await waiting == ENDED


@thoroughly
@given(value=documents(to_json(ENDED)))
async def test_any_document_in_the_place_of_an_end_ends_the_run(value: bytes) -> None:
    store = FailingStore(Clock())
    ends = RunEnds(store, job="job", run_id="default")
    await ends.start()
    await store.put(KEY, value)
    end = await ends.next_end()
    assert 0 <= end.exit_code <= 255
    (run,) = await list_runs(store)
    assert run.end == end
    if not end.left:
        with pytest.raises(AlreadyEnded, match="default"):
            await ends.start()
