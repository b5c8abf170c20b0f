"""What every store must do; tests/contract holds every adapter to it.

The semantics are etcd's: one revision counter for all keys, a lease that takes its keys with it,
writes guarded by the identity of another key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Protocol

from elastic.errors import TransientError


class GuardFailed(TransientError):
    """The guarding key is gone or is another one: its present holder decides."""


class LeaseLost(TransientError):
    """The lease has expired or was revoked; its keys are gone."""


class LeaseExists(TransientError):
    """The lease of this name has been granted already; known to those who name leases alone."""


class WatchCompacted(TransientError):
    """The store has forgotten changes that a watch asked for.

    List the keys, then watch after the listing's revision.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"changes before revision {revision} have been compacted away")
        self.revision = revision
        """The first whose change may still be asked for."""


class StoreWentBack(TransientError):
    """The store is at an earlier revision than it was: it was emptied, or restored from a backup.

    List the keys: nothing that was known of them holds.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key's value. Revisions count all writes to the store."""

    key: str
    value: bytes
    created: int
    """Revision at which the key came into being: the identity of a guard."""
    modified: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries under a prefix, by key, as they were at one revision of the store."""

    entries: tuple[Entry, ...]
    revision: int
    """Of the store, not of the entries: a watch after it tells all that is not in the listing."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key was written (`entry`) or went away (None) at `revision`."""

    key: str
    revision: int
    entry: Entry | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Write only while `key` exists and is still the one created at revision `created`.

    And under the same lease: revisions begin again in a store that was emptied or restored.
    """

    key: str
    created: int
    lease: int = 0

    @classmethod
    def of(cls, entry: Entry) -> Guard:
        """That the key is still this entry's."""
        return cls(key=entry.key, created=entry.created, lease=entry.lease)

    def holds(self, entry: Entry | None) -> bool:
        """Whether it does while `entry` is what the store has of the key."""
        return entry is not None and (entry.created, entry.lease) == (self.created, self.lease)


class Store(Protocol):
    """A revisioned key-value store. Any call may raise TransientError.

    A write that raises TransientError may have happened, or may yet happen, unless it is one of
    those that say otherwise: GuardFailed and LeaseLost.
    """

    async def get(self, key: str) -> Entry | None:
        """The key's entry, or None."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Entries whose key starts with `prefix`, by key."""
        ...

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        """Write once; raises GuardFailed, or LeaseLost if `lease` is unknown."""
        ...

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        """Write if the key is absent; None if it is there.

        After a failure on the way, whose key it is is told by its value and lease: those of
        competitors must differ.
        """
        ...

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        """Remove; True if it was there. Raises GuardFailed."""
        ...

    def watch(self, prefix: str, *, after: int) -> AsyncIterator[Change]:
        """Every change of keys under `prefix` after revision `after`, in order, none twice.

        Several keys may change at one revision, such as those of a lease. Outages are sat out;
        raises WatchCompacted, StoreWentBack, and ConfigurationError if the store has never
        answered.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """A lease that lives `ttl_s` seconds, or a little longer, after it was last renewed."""
        ...

    async def renew(self, lease: int) -> None:
        """Start the lease's time anew; raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and remove its keys; unknown leases are fine."""
        ...
