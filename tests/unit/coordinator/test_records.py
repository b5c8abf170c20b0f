"""The store keeps counts that outlive a leader."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given

from elastic.coordinator.leadership import lead
from elastic.coordinator.records import Records, load_records, save_records, since_boot, to_unix
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from tests.fuzzed_documents import documents, thoroughly

KEY = JobKeys("job").records
RECORDS = Records(
    started_unix_s=10.0,
    restarts=(20.0, 21.5),
    failures={"n1": (20.0,)},
    told_once={"0123": 7},
    recoveries=({"generation": 3, "total_s": 0.05},),
)


async def test_saved_records_are_loaded_unchanged() -> None:
    store = MemoryStore()
    leadership = await lead(store, job="job", candidate="c")
    assert (await load_records(store, "job")).restarts == ()
    await save_records(store, job="job", guard=leadership.guard, records=RECORDS)
    assert await load_records(store, "job") == RECORDS


@thoroughly
@given(
    value=documents(
        json.dumps(
            {
                "started_unix_s": 10.0,
                "restarts": [20.0],
                "failures": {"n1": [20.0]},
                "told_once": {"0123": 7},
                "recoveries": [{"generation": 3}],
            }
        ).encode()
    )
)
async def test_a_leader_can_begin_with_any_stored_records(value: bytes) -> None:
    store = MemoryStore()
    await store.put(KEY, value)
    records = await load_records(store, "job")
    since_boot(records.restarts)
    assert json.dumps(list(records.recoveries))


def test_times_are_converted_between_unix_time_and_time_since_boot() -> None:
    now, boot = time.time(), time.monotonic()
    first, second = since_boot([now - 5.0, now + 3600.0])
    assert first == pytest.approx(boot - 5.0, abs=0.5)
    assert second == pytest.approx(boot, abs=0.5), "none lies ahead"
    assert to_unix([boot - 5.0]) == pytest.approx([now - 5.0], abs=0.5)
