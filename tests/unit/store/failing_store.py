"""A store in memory whose calls fail as calls over a network do."""

from __future__ import annotations

import asyncio
from collections import Counter

from elastic.errors import TransientError
from elastic.store.interface import Entry, Guard, Listing
from elastic.store.memory import MemoryStore


class Clock:
    """Stands still until a test changes `now`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FailingStore(MemoryStore):
    """refuses: how many calls of a method fail without an effect. loses: how many fail after it.
    hangs: calls of these methods wait until the event is set."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.refuses: Counter[str] = Counter()
        self.loses: Counter[str] = Counter()
        self.hangs: dict[str, asyncio.Event] = {}

    async def _before(self, method: str) -> None:
        if method in self.hangs:
            await self.hangs[method].wait()
        if self.refuses[method] > 0:
            self.refuses[method] -= 1
            raise TransientError("etcd did not answer")

    def _after(self, method: str) -> None:
        if self.loses[method] > 0:
            self.loses[method] -= 1
            raise TransientError("etcd did not answer")

    async def get(self, key: str) -> Entry | None:
        await self._before("get")
        return await super().get(key)

    async def list(self, prefix: str) -> Listing:
        await self._before("list")
        return await super().list(prefix)

    async def put(
        self, key: str, value: bytes, *, guard: Guard | None = None, lease: int = 0
    ) -> Entry:
        await self._before("put")
        entry = await super().put(key, value, guard=guard, lease=lease)
        self._after("put")
        return entry

    async def delete(self, key: str, *, guard: Guard | None = None) -> bool:
        await self._before("delete")
        return await super().delete(key, guard=guard)

    async def create(self, key: str, value: bytes, *, lease: int = 0) -> Entry | None:
        await self._before("create")
        entry = await super().create(key, value, lease=lease)
        await self._before("answer to create")
        self._after("create")
        return entry

    async def grant(self, ttl_s: float) -> int:
        await self._before("grant")
        return await super().grant(ttl_s)

    async def renew(self, lease: int) -> None:
        await self._before("renew")
        await super().renew(lease)

    async def revoke(self, lease: int) -> None:
        await self._before("revoke")
        await super().revoke(lease)
