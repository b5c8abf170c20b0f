"""The store adapters that tests/contract holds to elastic/store/interface.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from elastic.store.interface import Change, Store
from elastic.store.memory import MemoryStore

DEADLINE_S = 10.0


@dataclass
class Adapter:
    """A store under test, made anew for each test, inside its event loop."""

    make: Callable[[], Store]
    pass_s: Callable[[float], Awaitable[None]]
    """Let this much of the store's own time pass."""
    ttl_s: float
    """The shortest lease that the store takes seriously."""


@pytest.fixture(params=["memory"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """To add an adapter: a parameter here, and a branch that returns it."""
    assert request.param == "memory"
    now = 0.0

    async def pass_s(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    return Adapter(make=lambda: MemoryStore(clock=lambda: now), pass_s=pass_s, ttl_s=5.0)


def within_deadline(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; nothing may hang."""
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


async def take(changes: AsyncIterator[Change], count: int) -> list[Change]:
    """The next `count` changes."""
    return [await anext(changes) for _ in range(count)]
