"""Loads and saves the records of a run that outlive its leader: restarts, failures, accounts.

What changes with every step is in one small entry, and each incident in its own: so a leader writes
only what has changed, since etcd keeps every version until it is compacted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from elastic.core.legible import is_representable_time
from elastic.settings.limits import require_node_name
from elastic.store.interface import Guard, Store
from elastic.store.job_incidents import read_incident
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import DEFAULT_RUN
from elastic.store.retries import retry

_MOST = 10_000  # items that are read of a list, and of told_once


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """What a leader stores for later leaders. Instants are Unix seconds."""

    started_unix_s: float = field(default_factory=time.time)
    """When the run began."""
    restarts: tuple[float, ...] = ()
    """Restarts that count against the budget."""
    failures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """When the failures that count against a machine happened, by the machine's name."""
    told_once: Mapping[str, int] = field(default_factory=dict)
    """The newest message number of each source that leaders have counted; see ToldOnce."""
    totals: Mapping[str, Any] = field(default_factory=dict)
    """The totals of the whole run, as `Totals.to_document` returns them; empty: unknown."""
    accounts: Mapping[str, Any] = field(default_factory=dict)
    """Where the time of slots went, as `SlotAccounts.to_document` returns it; empty: unknown."""
    incidents: Mapping[int, bytes] = field(default_factory=dict)
    """The records of the newest incidents by number, as `Watch.incidents_to_store` returns them."""
    begun: bool = False
    """A step of the job was committed: nobody begins with the initial state any more."""
    are_kept: bool = True
    """These records are in the store."""
    entries: Mapping[str, bytes] = field(default_factory=dict, compare=False)
    """The values in the store by key, from which these records were read."""


def since_boot(instants: Sequence[float]) -> list[float]:
    """Convert Unix seconds to sorted instants of time.monotonic; future ones become now."""
    ahead = time.time() - time.monotonic()
    return sorted(min(at - ahead, time.monotonic()) for at in instants)


def to_unix(instants: Sequence[float]) -> tuple[float, ...]:
    """Convert instants of time.monotonic to Unix seconds."""
    ahead = time.time() - time.monotonic()
    return tuple(round(at + ahead, 3) for at in instants)


class RecordWriter:
    """Writes the records of a job, each time only the entries that have changed."""

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        run_id: str = DEFAULT_RUN,
        guard: Guard,
        stored: Mapping[str, bytes],
    ) -> None:
        """stored: the entries that the store has, by key."""
        self._store, self._guard, self._keys = store, guard, JobKeys(job)
        self._run_id, self._stored = run_id, dict(stored)
        self.written_bytes = 0
        """How much was written last."""

    async def save(self, records: Records) -> None:
        """Store the records; waits out outages. Raises GuardFailed if another coordinator leads.

        The entry of restarts, counts and numbers comes last and in one write: what it counts once
        and what is counted stay together, and nobody tells of a step again that ends a loss.
        """
        entries = _entries(self._keys, self._run_id, records)
        self.written_bytes = 0
        for key, value in entries.items():
            if self._stored.get(key) != value:
                self.written_bytes += len(value)
                await retry(
                    lambda key=key, value=value: self._store.put(key, value, guard=self._guard),  # type: ignore[misc]
                    "save the records",
                )
                self._stored[key] = value
        for key in self._stored.keys() - entries.keys():
            await retry(
                lambda key=key: self._store.delete(key, guard=self._guard),  # type: ignore[misc]
                "remove an old record",
            )
            del self._stored[key]


def _entries(keys: JobKeys, run_id: str, records: Records) -> dict[str, bytes]:
    """Return the values by key; the key of all other records is the last."""
    document = {one.name: getattr(records, one.name) for one in fields(Records)}
    del document["are_kept"], document["entries"], document["incidents"]
    document["recoveries"] = []  # an earlier version needs the field
    found = {keys.incident(run_id, number): value for number, value in records.incidents.items()}
    return {**found, keys.records: json.dumps(document).encode()}


async def load_records(store: Store, job: str, run_id: str = DEFAULT_RUN) -> Records:
    """Return the records of earlier leaders; empty ones if there are none or they are unreadable.
    Raises TransientError."""
    keys = JobKeys(job)
    folders = (keys.records, keys.incidents_of(run_id))
    entries = {e.key: e.value for folder in folders for e in await store.list(folder)}
    incidents = {
        document["number"]: value
        for key, value in entries.items()
        if key.startswith(keys.incidents)
        if (document := read_incident(value)) is not None
        if key == keys.incident(run_id, document["number"])
    }
    if keys.records not in entries:
        return Records(are_kept=False, incidents=incidents, entries=entries)
    try:
        document = json.loads(entries[keys.records])
        for machine in document["failures"]:
            require_node_name(machine, "machine")
        return Records(
            started_unix_s=_instants([document["started_unix_s"]])[0],
            restarts=_instants(document["restarts"]),
            failures={name: _instants(found) for name, found in document["failures"].items()},
            told_once={
                str(source): int(number)
                for source, number in list(_table(document.get("told_once")).items())[-_MOST:]
            },
            totals=_table(document.get("totals")),
            accounts=_table(document.get("accounts")),
            incidents=incidents,
            begun=document.get("begun") is True,
            entries=entries,
        )
    except Exception:  # noqa: BLE001 - it may be malformed in any way
        return Records(are_kept=False, incidents=incidents, entries=entries)


def _table(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _instants(found: Sequence[Any]) -> tuple[float, ...]:
    instants = tuple(float(at) for at in found[-_MOST:])
    if not all(map(is_representable_time, instants)):
        raise ValueError(f"not all are valid times: {instants}")
    return instants
