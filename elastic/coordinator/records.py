"""Loads and saves the records of a run that outlive its leader: restarts, failures, accounts.

What changes with every step is in one small entry, and each incident of the accounts in its own: so
a leader writes only what has changed, since etcd keeps every version until it is compacted.
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
from elastic.store.job_keys import JobKeys
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
        self, store: Store, *, job: str, guard: Guard, stored: Mapping[str, bytes]
    ) -> None:
        """stored: the entries that the store has, by key."""
        self._store, self._guard, self._keys = store, guard, JobKeys(job)
        self._stored = dict(stored)
        self.steps_bytes = 0
        """The size of the entry that changes with every step."""

    async def save(self, records: Records) -> None:
        """Store the records; waits out outages. Raises GuardFailed if another coordinator leads.

        The entry of restarts, counts and numbers comes last and in one write: what it counts once
        and what is counted stay together.
        """
        entries = _entries(self._keys, records)
        self.steps_bytes = len(entries[self._keys.records])
        for key, value in entries.items():
            if self._stored.get(key) != value:
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


def _entries(keys: JobKeys, records: Records) -> dict[str, bytes]:
    """Return the values by key; the key of all other records is the last."""
    document = {one.name: getattr(records, one.name) for one in fields(Records)}
    del document["are_kept"], document["entries"]
    accounts = document["accounts"]
    books = _table(accounts.get("books"))
    incidents = _by_number(books.get("incidents"))
    if incidents:
        document["accounts"] = {**accounts, "books": {**books, "incidents": []}}
    found: dict[str, Any] = {keys.record_of_incident(n): i for n, i in incidents.items()}
    found[keys.records] = {**document, "recoveries": []}  # an earlier version needs the field
    return {key: json.dumps(value).encode() for key, value in found.items()}


async def load_records(store: Store, job: str) -> Records:
    """Return the records of earlier leaders; empty ones if there are none or they are unreadable.
    Raises TransientError."""
    keys = JobKeys(job)
    entries = {entry.key: entry.value for entry in await store.list(keys.records)}
    if keys.records not in entries:
        return Records(are_kept=False, entries=entries)
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
            accounts=_with_incidents(_table(document.get("accounts")), keys, entries),
            begun=document.get("begun") is True,
            entries=entries,
        )
    except Exception:  # noqa: BLE001 - it may be malformed in any way
        return Records(are_kept=False, entries=entries)


def _with_incidents(
    accounts: Mapping[str, Any], keys: JobKeys, entries: Mapping[str, bytes]
) -> Mapping[str, Any]:
    """Return the accounts with the incidents that have entries of their own."""
    books = _table(accounts.get("books"))
    apart = [_legible(v, None) for key, v in entries.items() if key.startswith(keys.of_incidents)]
    found = _by_number(apart) | _by_number(books.get("incidents"))
    if not found:
        return accounts
    return {**accounts, "books": {**books, "incidents": [found[n] for n in sorted(found)]}}


def _by_number(incidents: Any) -> dict[int, Any]:
    """Return those incidents of a document that can be told apart, by number."""
    if not isinstance(incidents, list):
        return {}
    numbered = [i for i in incidents if isinstance(i, dict) and type(i.get("number")) is int]
    return {i["number"]: i for i in numbered if 0 < i["number"] < 2**53}


def _legible(value: bytes | None, otherwise: Any) -> Any:
    try:
        return json.loads(value) if value is not None else otherwise
    except (ValueError, RecursionError):
        return otherwise


def _table(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _instants(found: Sequence[Any]) -> tuple[float, ...]:
    instants = tuple(float(at) for at in found[-_MOST:])
    if not all(map(is_representable_time, instants)):
        raise ValueError(f"not all are valid times: {instants}")
    return instants
