"""Finds a job's leader in the store, and follows its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from elastic.core.documents import Unreadable
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Store
from elastic.store.job_documents import leader_from_json
from elastic.store.job_keys import JobKeys

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leader:
    """The elected leader. A later leader has a greater `term`, even at the same address."""

    address: str
    """host:port"""
    term: int


class LeaderWatch:
    """Follows the leader for any number of readers. Start `run` once.

    While nobody leads, or the store does not answer, the last known leader stays: usually it is
    alive when the store is not.
    """

    def __init__(self, store: Store, *, job: str) -> None:
        self._store = store
        self._key = JobKeys(job).leader
        self._changed = asyncio.Event()
        self.leader: Leader | None = None
        """The last known leader."""
        self.vacant = False
        """True while the store says that nobody leads."""

    async def run(self) -> None:
        """Follow until cancelled. Raises ConfigurationError if the store does."""
        async with aclosing(follow_key(self._store, self._key)) as entries:
            async for entry in entries:
                self.vacant = entry is None
                found = leader_from(entry)
                if found is not None and found != self.leader:
                    self.leader = found
                    self._changed.set()
                    self._changed = asyncio.Event()

    async def newer(self, than: Leader | None = None) -> Leader:
        """Wait for the first known leader that is not `than`, and return it."""
        while self.leader is None or self.leader == than:
            await self._changed.wait()
        return self.leader

    async def leaders(self) -> AsyncGenerator[Leader, None]:
        """Yield the known leader and each later one; may skip leaders in between."""
        leader = None
        while True:
            leader = await self.newer(leader)
            yield leader


async def find_leader(store: Store, *, job: str) -> Leader | None:
    """Ask the store once; None if nobody leads. Raises TransientError."""
    return leader_from(await store.get(JobKeys(job).leader))


def leader_from(entry: Entry | None) -> Leader | None:
    """The holder of the election key; None if there is none, or if it cannot be read."""
    if entry is None:
        return None
    try:
        document = leader_from_json(entry.value)
    except Unreadable as error:
        _LOG.warning("the leader in %s cannot be read: %s", entry.key, error)
        return None
    if not document.address:  # `forget_run` holds the key: it does not lead
        return None
    return Leader(address=document.address, term=entry.created)
