"""Loads and saves the records of a run that outlive its leader: restarts, failures, recoveries."""

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
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """The records of the newest recoveries, newest last."""
    totals: Mapping[str, Any] = field(default_factory=dict)
    """The totals of the whole run, as `Totals.to_document` returns them; empty: unknown."""
    accounts: Mapping[str, Any] = field(default_factory=dict)
    """Where the time of slots went, as `SlotAccounts.to_document` returns it; empty: unknown."""
    are_kept: bool = True
    """These records are in the store."""


def since_boot(instants: Sequence[float]) -> list[float]:
    """Convert Unix seconds to sorted instants of time.monotonic; future ones become now."""
    ahead = time.time() - time.monotonic()
    return sorted(min(at - ahead, time.monotonic()) for at in instants)


def to_unix(instants: Sequence[float]) -> tuple[float, ...]:
    """Convert instants of time.monotonic to Unix seconds."""
    ahead = time.time() - time.monotonic()
    return tuple(round(at + ahead, 3) for at in instants)


async def save_records(store: Store, *, job: str, guard: Guard, records: Records) -> None:
    """Store the records; waits out outages. Raises GuardFailed if another coordinator leads."""
    document = {one.name: getattr(records, one.name) for one in fields(Records)}
    del document["are_kept"]
    key, value = JobKeys(job).records, json.dumps(document).encode()
    await retry(lambda: store.put(key, value, guard=guard), "save the records")


async def load_records(store: Store, job: str) -> Records:
    """Return the records of earlier leaders; empty ones if there are none or they are unreadable.
    Raises TransientError."""
    entry = await store.get(JobKeys(job).records)
    if entry is None:
        return Records(are_kept=False)
    try:
        document = json.loads(entry.value)
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
            recoveries=tuple(dict(recovery) for recovery in document["recoveries"][-_MOST:]),
            totals=_table(document.get("totals")),
            accounts=_table(document.get("accounts")),
        )
    except Exception:  # noqa: BLE001 - it may be malformed in any way
        return Records(are_kept=False)


def _table(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _instants(found: Sequence[Any]) -> tuple[float, ...]:
    instants = tuple(float(at) for at in found[-_MOST:])
    if not all(map(is_representable_time, instants)):
        raise ValueError(f"not all are valid times: {instants}")
    return instants
