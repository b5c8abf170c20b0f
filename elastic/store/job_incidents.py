"""Reads the records of a run's newest incidents; each has a key of its own in the store."""

from __future__ import annotations

import json
from typing import Any

from elastic.core.legible import is_representable_time, is_utf8_encodable
from elastic.store.interface import Store
from elastic.store.job_keys import JobKeys


async def load_incidents(store: Store, job: str, run_id: str) -> dict[int, dict[str, Any]]:
    """A run's incidents by number, without unreadable ones and planned changes of the group, which
    have a cost, too. Raises TransientError."""
    folder = JobKeys(job).incidents_of(run_id)
    found = {}
    for entry in await store.list(folder):
        document = read_incident(entry.value)
        if document is None or document.get("outcome") == "planned":
            continue
        if entry.key.endswith(f"/{document['number']:09d}"):
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
