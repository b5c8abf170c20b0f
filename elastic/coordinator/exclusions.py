"""Nodes that are not to take part, drained by an operator or quarantined, as the store has them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from elastic.core.legible import is_instant, is_text
from elastic.store.interface import Entry, Guard, Store
from elastic.store.job_keys import JobKeys, node_of

DRAINED, QUARANTINED = "drained", "quarantined"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Why a node is out, and since when."""

    state: str
    reason: str
    since_unix_s: float


class Exclusions:
    """By node name. What the store does not take raises as its `put` does."""

    def __init__(self, store: Store, *, job: str, guard: Guard) -> None:
        self._store = store
        self._keys = JobKeys(job)
        self._guard = guard
        self._excluded: dict[str, Exclusion] = {}

    async def load(self) -> None:
        """Those of the coordinators before. Raises TransientError."""
        folders = {DRAINED: self._keys.draining, QUARANTINED: self._keys.quarantined}
        for state, folder in folders.items():
            for entry in await self._store.list(folder):
                self._excluded[node_of(entry.key)] = _exclusion(state, entry)

    def get(self, name: str) -> Exclusion | None:
        """Why the node is out; None if it is not."""
        return self._excluded.get(name)

    def names(self) -> list[str]:
        """All that are out."""
        return sorted(self._excluded)

    async def add(self, name: str, state: str, reason: str) -> None:
        """It is to take no part until cleared."""
        exclusion = Exclusion(state=state, reason=reason, since_unix_s=time.time())
        self._excluded[name] = exclusion
        document = {"reason": reason, "since_unix_s": exclusion.since_unix_s}
        await self._store.put(
            self._key(name, state), json.dumps(document).encode(), guard=self._guard
        )

    async def clear(self, name: str) -> Exclusion | None:
        """It may take part again; what it was out for."""
        if name not in self._excluded:
            return None
        for state in (DRAINED, QUARANTINED):  # it may have been both, one after the other
            await self._store.delete(self._key(name, state), guard=self._guard)
        return self._excluded.pop(name, None)

    def _key(self, name: str, state: str) -> str:
        return self._keys.drain(name) if state == DRAINED else self._keys.quarantine(name)


def _exclusion(state: str, entry: Entry) -> Exclusion:
    """One that can not be read keeps its node out all the same, until it is cleared."""
    try:
        document = json.loads(entry.value)
        reason, since_unix_s = str(document["reason"]), float(document["since_unix_s"])
        legible = is_text(reason) and is_instant(since_unix_s)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        legible = False
    if not legible:
        reason = f"the store's key {entry.key} says that it is {state}, and can not be read"
        since_unix_s = time.time()
    return Exclusion(state=state, reason=reason, since_unix_s=since_unix_s)
