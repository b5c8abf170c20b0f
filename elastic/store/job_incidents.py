"""Keeps the records of a run's newest incidents in the store, one key for each."""

from __future__ import annotations

import json
from typing import Any

from elastic.core.legible import is_representable_time, is_utf8_encodable
from elastic.store.interface import Guard, Store
from elastic.store.job_keys import JobKeys
from elastic.store.retries import retry


class IncidentKeeper:
    """Writes records while the guard holds. Waits through outages; raises GuardFailed."""

    def __init__(self, store: Store, *, job: str, run_id: str, guard: Guard) -> None:
        self._store, self._keys = store, JobKeys(job)
        self._run_id, self._guard = run_id, guard
        self.stored: dict[int, object] = {}
        """The values in the store by incident number."""

    async def keep(self, number: int, value: bytes, *, most: int) -> None:
        """Write the record, and remove the oldest ones if there are more than `most`."""
        if self.stored.get(number) == value:
            return
        key = self._keys.incident(self._run_id, number)
        await retry(
            lambda: self._store.put(key, value, guard=self._guard), f"keep incident {number}"
        )
        self.stored[number] = value
        for old in sorted(self.stored)[:-most]:
            stale = self._keys.incident(self._run_id, old)
            await retry(
                lambda stale=stale: self._store.delete(stale, guard=self._guard),  # type: ignore[misc]
                f"remove incident {old}",
            )
            del self.stored[old]


async def load_incidents(store: Store, job: str, run_id: str) -> dict[int, dict[str, Any]]:
    """A run's incidents by number, without unreadable ones. Raises TransientError."""
    folder = JobKeys(job).incidents_of(run_id)
    found = {}
    for entry in await store.list(folder):
        document = read_incident(entry.value)
        if document is not None and entry.key.endswith(f"/{document['number']:09d}"):
            found[document["number"]] = document
    return dict(sorted(found.items()))


def read_incident(value: bytes) -> dict[str, Any] | None:
    """The record's document; None if it cannot be read."""
    try:
        document = json.loads(value)
        number, at = document["number"], float(document["unix_s"])
        legible = type(number) is int and 0 < number < 2**53 and is_representable_time(at)
        json.dumps(document, allow_nan=False)
        legible = legible and is_utf8_encodable(json.dumps(document, ensure_ascii=False))
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, AttributeError):
        return None
    return document if legible else None
