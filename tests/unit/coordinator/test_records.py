"""The store keeps counts that outlive a leader."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given

from elastic.coordinator.leadership import lead
from elastic.coordinator.records import Records, RecordWriter, load_records, since_boot, to_unix
from elastic.store.interface import Entry, Guard
from elastic.store.job_keys import JobKeys
from elastic.store.memory import MemoryStore
from tests.fuzzed_documents import documents, thoroughly

KEYS = JobKeys("job")
KEY = KEYS.records
RECORDS = Records(
    started_unix_s=10.0,
    restarts=(20.0, 21.5),
    failures={"n1": (20.0,)},
    told_once={"0123": 7},
)


ACCOUNTS = {"books": {"wall_s": 8.0}, "unix_s": 30.0}
INCIDENTS = {n: json.dumps({"number": n, "unix_s": 1.75e9}).encode() for n in (1, 2, 3)}


class CountingStore(MemoryStore):
    """Counts the bytes that a job writes, as etcd keeps them until it is compacted."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int]] = []

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        self.written.append((key, len(value)))
        return await super().put(key, value, guard=guard, lease=lease)


async def test_saved_records_are_loaded_unchanged() -> None:
    store = MemoryStore()
    leadership = await lead(store, job="job", candidate="c")
    assert (await load_records(store, "job")).restarts == ()
    writer = RecordWriter(store, job="job", guard=leadership.guard, stored={})
    await writer.save(RECORDS)
    assert await load_records(store, "job") == RECORDS
    full = replace(RECORDS, accounts=ACCOUNTS, incidents=INCIDENTS)
    await writer.save(full)
    assert await load_records(store, "job") == full
    fewer = replace(full, incidents={3: INCIDENTS[3]})
    await writer.save(fewer)
    assert await load_records(store, "job") == fewer


async def test_only_changed_entries_are_written_by_this_and_the_next_leader() -> None:
    store = CountingStore()
    leadership = await lead(store, job="job", candidate="c")
    writer = RecordWriter(store, job="job", guard=leadership.guard, stored={})
    full = replace(RECORDS, accounts=ACCOUNTS, incidents=INCIDENTS)
    await writer.save(full)
    store.written.clear()
    steps = {**ACCOUNTS, "unix_s": 40.0}
    await writer.save(replace(full, accounts=steps))
    assert [key for key, _ in store.written] == [KEY]
    store.written.clear()
    found = await load_records(store, "job")
    after = RecordWriter(store, job="job", guard=leadership.guard, stored=found.entries)
    await after.save(found)
    assert store.written == []
    costlier = {**INCIDENTS, 3: INCIDENTS[3] + b" "}
    await after.save(replace(found, accounts={"unix_s": 50.0}, incidents=costlier))
    assert [key for key, _ in store.written] == [KEYS.incident("default", 3), KEY]


async def test_records_of_an_earlier_version_are_one_entry() -> None:
    store = MemoryStore()
    document = {
        **{"started_unix_s": 10.0, "restarts": [20.0, 21.5], "failures": {"n1": [20.0]}},
        **{"told_once": {"0123": 7}, "recoveries": [{"generation": 3, "total_s": 0.05}]},
        "accounts": ACCOUNTS,
    }
    await store.put(KEY, json.dumps(document).encode())
    assert await load_records(store, "job") == replace(RECORDS, accounts=ACCOUNTS)


async def test_the_last_write_has_what_is_counted_once_and_the_counts_together() -> None:
    store = CountingStore()
    leadership = await lead(store, job="job", candidate="c")
    writer = RecordWriter(store, job="job", guard=leadership.guard, stored={})
    await writer.save(replace(RECORDS, incidents=INCIDENTS, totals={"weight": 3}))
    assert store.written[-1][0] == KEY
    entry = await store.get(KEY)
    assert entry is not None
    last = json.loads(entry.value)
    assert (last["told_once"], last["totals"]) == ({"0123": 7}, {"weight": 3})
    assert last["recoveries"] == [], "leaders of an earlier version need the field"


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


def test_times_are_converted_between_unix_time_and_time_since_boot() -> None:
    now, boot = time.time(), time.monotonic()
    first, second = since_boot([now - 5.0, now + 3600.0])
    assert first == pytest.approx(boot - 5.0, abs=0.5)
    assert second == pytest.approx(boot, abs=0.5), "none lies ahead"
    assert to_unix([boot - 5.0]) == pytest.approx([now - 5.0], abs=0.5)
