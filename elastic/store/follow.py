"""Follows keys and their changes, by list and watch, through outages of the store."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from elastic.store.interface import Change, Entry, Listing, Store, StoreWentBack, WatchCompacted
from elastic.store.retries import retry

_LOG = logging.getLogger(__name__)


async def follow(store: Store, prefix: str) -> AsyncGenerator[Listing | Change, None]:
    """Yield a Listing, then each change of it; a Listing again if the store has forgotten changes.

    Waits through outages. Raises ConfigurationError if the store does.
    """
    while True:
        listing = await retry(lambda: store.list(prefix), f"list {prefix!r}")
        yield listing
        try:
            watch = store.watch(prefix, after=listing.revision)
            async with aclosing(watch) as changes:  # type: ignore[type-var]
                async for change in changes:
                    yield change
        except WatchCompacted:
            continue
        except StoreWentBack as error:
            _LOG.warning("%s: %s", prefix, error)


async def follow_key(store: Store, key: str) -> AsyncGenerator[Entry | None, None]:
    """Yield the key's entry now and after each change; None while it is absent. See `follow`."""
    async with aclosing(follow(store, key)) as news:
        async for item in news:
            if isinstance(item, Listing):
                yield next((entry for entry in item.entries if entry.key == key), None)
            elif item.key == key:
                yield item.entry
