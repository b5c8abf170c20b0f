"""Defines what every store must do; tests/contract checks every adapter.

The semantics are etcd's: one revision counter for all keys, leases whose end removes their keys,
and writes guarded by the identity of another key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Protocol

from elastic.errors import TransientError


class GuardFailed(TransientError):
    """The guarding key is gone or was created again: its present holder decides."""


class LeaseLost(TransientError):
    """The lease has expired or was revoked; its keys are gone."""


class LeaseExists(TransientError):
    """A lease of this name exists already. Only callers that name their leases can get this."""


class WatchCompacted(TransientError):
    """The store has forgotten changes that a watch asked for.

    List the keys, then watch after the listing's revision.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"changes before revision {revision} have been compacted away")
        self.revision = revision
        """The first revision whose change the store still has."""


class StoreWentBack(TransientError):
    """The store is at an earlier revision than before: it was emptied, or restored from a backup.

    List the keys again: all earlier knowledge of them is void.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key's value. Revisions count all writes to the store."""

    key: str
    value: bytes
    created: int
    """The revision at which the key was created: its identity for a Guard."""
    modified: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries under a prefix, by key, as they were at one revision of the store."""

    entries: tuple[Entry, ...]
    revision: int
    """The store's revision: a watch after it yields every change that the listing lacks."""

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

    Its lease must be the same, too: revisions begin again in a store that was emptied or restored.
    """

    key: str
    created: int
    lease: int = 0

    @classmethod
    def of(cls, entry: Entry) -> Guard:
        """The guard that holds while the key is still this entry."""
        return cls(key=entry.key, created=entry.created, lease=entry.lease)

    def holds(self, entry: Entry | None) -> bool:
        """Whether the guard holds, given the key's entry in the store."""
        return entry is not None and (entry.created, entry.lease) == (self.created, self.lease)


class Store(Protocol):
    """A revisioned key-value store. Any call may raise TransientError.

    A write that raises TransientError may have happened, or may still happen. Only GuardFailed and
    LeaseLost say that it did not.
    """

    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Listing:
        """The entries whose key starts with `prefix`, sorted by key."""
        ...

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        """Write once; raises GuardFailed, or LeaseLost if `lease` is unknown."""
        ...

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        """Write if the key is absent; None if it exists.

        After a failure on the way, the key's value and lease tell who created it: those of
        competitors must differ.
        """
        ...

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        """Remove the key; True if it existed. Raises GuardFailed."""
        ...

    def watch(self, prefix: str, *, after: int) -> AsyncIterator[Change]:
        """Yield every change of keys under `prefix` after revision `after`, in order, none twice.

        Several keys may change at one revision, such as those of a lease. Waits through outages;
        raises WatchCompacted, StoreWentBack, and ConfigurationError if the store has never
        answered.
        """
        ...

    async def grant(self, ttl_s: float) -> int:
        """Grant a lease that lives `ttl_s` seconds, or a little longer, after its last renewal."""
        ...

    async def renew(self, lease: int) -> None:
        """Start the lease's time again; raises LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and remove its keys; an unknown lease is no error."""
        ...
