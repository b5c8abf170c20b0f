"""Keys as they are now and as they change, by list and watch, through outages of the store."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from elastic.store.interface import Change, Entry, Store, StoreWentBack, WatchCompacted
from elastic.store.retries import until_answered

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries there are; what was known before and is not among them is gone."""

    entries: tuple[Entry, ...]


async def follow(store: Store, prefix: str) -> AsyncGenerator[Listing | Change, None]:
    """A Listing, then each change of it; a Listing again if the store has forgotten changes.

    Outages are sat out. Raises ConfigurationError if the store does.
    """
    after = 0
    while True:
        entries = await until_answered(lambda: store.list(prefix), f"list {prefix!r}")
        after = max([after, *(entry.modified for entry in entries)])
        yield Listing(tuple(entries))
        seen = _Seen(store, entries)
        try:
            async with aclosing(store.watch(prefix, after=after)) as changes:  # type: ignore[type-var]
                async for change in changes:
                    after = max(after, change.revision)
                    if await seen.is_new(change):
                        yield change
        except WatchCompacted as compacted:
            after = max(after, compacted.revision)
        except StoreWentBack as error:
            _LOG.warning("%s: %s", prefix, error)
            after = 0


async def follow_key(store: Store, key: str) -> AsyncGenerator[Entry | None, None]:
    """The key's entry now, and after each change; None while there is none. See `follow`."""
    async with aclosing(follow(store, key)) as news:
        async for item in news:
            if isinstance(item, Listing):
                yield next((entry for entry in item.entries if entry.key == key), None)
            elif item.key == key:
                yield item.entry


class _Seen:
    """Tells changes that came after a list from those before it.

    A list does not say at which revision it was made: it shows the newest revision among its keys,
    and the watch after that one begins with the history of keys that had come and gone by then.
    """

    def __init__(self, store: Store, entries: list[Entry]) -> None:
        self._store = store
        self._modified = {entry.key: entry.modified for entry in entries}
        self._caught_up = False

    async def is_new(self, change: Change) -> bool:
        if change.entry is None:
            return self._modified.pop(change.key, None) is not None
        if change.revision <= self._modified.get(change.key, 0):
            return False
        if not self._caught_up and change.key not in self._modified:
            # If it is there now it was written after the list, which did not show it.
            now = await until_answered(lambda: self._store.get(change.key), f"get {change.key!r}")
            if now is None or now.modified != change.revision:
                return False
        self._caught_up = True
        self._modified[change.key] = change.revision
        return True
