"""Machines that are not to take part, drained or quarantined, as the store has them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from elastic.core.legible import is_instant, is_text
from elastic.store.interface import Entry, Guard, Store
from elastic.store.job_keys import JobKeys, node_of

DRAINED, QUARANTINED = "drained", "quarantined"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Why a machine is out, and since when."""

    state: str
    reason: str
    since_unix_s: float
    machine: str = ""
    """Empty: nobody knows which machine it is, only a name, which a node or a machine may have. So
    it is with a node that has not come yet, and with what older versions have stored."""
    node: str = ""
    """The name that a node on this machine had; empty for a name alone."""


class Exclusions:
    """By the names of machines. What the store does not take raises as its `put` does."""

    def __init__(self, store: Store, *, job: str, guard: Guard) -> None:
        self._store = store
        self._keys = JobKeys(job)
        self._guard = guard
        self._excluded: dict[str, Exclusion] = {}
        self._writes = asyncio.Lock()  # what is cleared must not be stored by a write under way

    async def load(self) -> None:
        """Those of the coordinators before. Raises TransientError."""
        folders = {DRAINED: self._keys.draining, QUARANTINED: self._keys.quarantined}
        for state, folder in folders.items():
            for entry in await self._store.list(folder):
                self._excluded[node_of(entry.key)] = _exclusion(state, entry)

    def get(self, name: str) -> Exclusion | None:
        """Why what is kept out under this name is; None if nothing is."""
        return self._excluded.get(name)

    def of(self, machine: str, node: str) -> Exclusion | None:
        """Why a node of this name on this machine is out; None if it is not."""
        found = self._excluded.get(machine)
        if found is None and (by_name := self._excluded.get(node)) and not by_name.machine:
            found = by_name
        return found

    def names(self) -> list[str]:
        """All that are out: machines, and names of which nobody knows the machine."""
        return sorted(self._excluded)

    def named(self, name: str) -> list[str]:
        """Those of `names` that people mean by the name of a machine or of a node on it."""
        if name in self._excluded:
            return [name]
        return [key for key in self.names() if self._excluded[key].node == name]

    async def add(
        self, name: str, state: str, reason: str, *, node: str = "", is_machine: bool = False
    ) -> None:
        """It is to take no part until cleared, once the store has it. `node`: the name that the
        machine's node has."""
        exclusion = _new(name, state, reason, node, is_machine=is_machine)
        async with self._writes:
            await self._put(name, exclusion)
            self._excluded[name] = exclusion

    def presume(
        self, name: str, state: str, reason: str, *, node: str = "", is_machine: bool = False
    ) -> None:
        """The same at once; `keep` has it stored."""
        self._excluded[name] = _new(name, state, reason, node, is_machine=is_machine)

    async def keep(self, name: str) -> None:
        """Store why it takes no part; nothing if it has been cleared."""
        async with self._writes:
            if (exclusion := self._excluded.get(name)) is not None:
                await self._put(name, exclusion)

    async def clear(self, name: str) -> Exclusion | None:
        """One of `names` may take part again; what it was out for."""
        async with self._writes:
            if name not in self._excluded:
                return None
            for state in (DRAINED, QUARANTINED):  # it may have been both, one after the other
                await self._store.delete(self._key(name, state), guard=self._guard)
            return self._excluded.pop(name, None)

    async def _put(self, name: str, exclusion: Exclusion) -> None:
        document = {
            "reason": exclusion.reason,
            "since_unix_s": exclusion.since_unix_s,
            "machine": exclusion.machine,
            "node": exclusion.node,
        }
        key = self._key(name, exclusion.state)
        await self._store.put(key, json.dumps(document).encode(), guard=self._guard)

    def _key(self, name: str, state: str) -> str:
        return self._keys.drain(name) if state == DRAINED else self._keys.quarantine(name)


def _new(name: str, state: str, reason: str, node: str, *, is_machine: bool) -> Exclusion:
    return Exclusion(
        state=state,
        reason=reason,
        since_unix_s=time.time(),
        machine=name if is_machine else "",
        node=node,
    )


def _exclusion(state: str, entry: Entry) -> Exclusion:
    """One that cannot be read keeps out what has its name all the same, until it is cleared."""
    machine = node = ""
    try:
        document = json.loads(entry.value)
        reason, since_unix_s = str(document["reason"]), float(document["since_unix_s"])
        legible = is_text(reason) and is_instant(since_unix_s)
        if _is_name(document.get("machine")) and _is_name(document.get("node")):
            machine, node = document["machine"], document["node"]
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, AttributeError):
        legible = False
    if not legible:
        reason = f"the store's key {entry.key} says that it is {state}, and cannot be read"
        since_unix_s = time.time()
    if machine != node_of(entry.key):  # an older version's, or of a name alone
        machine = node = ""
    return Exclusion(
        state=state, reason=reason, since_unix_s=since_unix_s, machine=machine, node=node
    )


def _is_name(found: Any) -> bool:
    return isinstance(found, str) and is_text(found)
