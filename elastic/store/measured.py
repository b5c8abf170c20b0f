"""Wraps a store to time its calls and to count its failures."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from elastic.core.histogram import CALL_BOUNDS_S, Histogram
from elastic.errors import ElasticError
from elastic.store.interface import Change, Entry, Guard, GuardFailed, LeaseLost, Listing, Store

T = TypeVar("T")

_KINDS = ("get", "list", "put", "create", "delete", "grant", "renew", "revoke")
_ANSWERS = (GuardFailed, LeaseLost)


class StoreCalls:
    """The durations and failures of a process's store calls, by kind. The metrics show them."""

    def __init__(self) -> None:
        self.durations = {kind: Histogram(CALL_BOUNDS_S) for kind in _KINDS}
        self.errors = dict.fromkeys(_KINDS, 0)
        self.answered_unix_s: float | None = None
        """When the store last answered; None before the first answer."""
        self.fails_since: float | None = None
        """When the first of the calls began that all failed since the last answer, by
        time.monotonic; None: the last call was answered."""


class MeasuredStore:
    """The same store with its calls measured; watches are not measured."""

    def __init__(self, store: Store, calls: StoreCalls) -> None:
        self._store, self._calls = store, calls

    async def get(self, key: str) -> Entry | None:
        return await self._timed("get", self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._timed("list", self._store.list(prefix))

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        return await self._timed("put", self._store.put(key, value, guard=guard, lease=lease))

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        return await self._timed("create", self._store.create(key, value, lease=lease))

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        return await self._timed("delete", self._store.delete(key, guard=guard))

    def watch(self, prefix: str, *, after: int) -> AsyncIterator[Change]:
        return self._store.watch(prefix, after=after)

    async def grant(self, ttl_s: float) -> int:
        return await self._timed("grant", self._store.grant(ttl_s))

    async def renew(self, lease: int) -> None:
        await self._timed("renew", self._store.renew(lease))

    async def revoke(self, lease: int) -> None:
        await self._timed("revoke", self._store.revoke(lease))

    async def _timed(self, kind: str, call: Awaitable[T]) -> T:
        calls, began_at = self._calls, time.monotonic()
        try:
            answer = await call
        except _ANSWERS:
            self._answered()
            raise
        except ElasticError:
            calls.errors[kind] += 1
            calls.fails_since = began_at if calls.fails_since is None else calls.fails_since
            raise
        finally:
            calls.durations[kind].observe(time.monotonic() - began_at)
        self._answered()
        return answer

    def _answered(self) -> None:
        self._calls.answered_unix_s, self._calls.fails_since = time.time(), None
