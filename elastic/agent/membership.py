"""The agent's ties to a job of many nodes: its name, its leader, and how long it may do without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from elastic.agent.coordinator_link import Leader
from elastic.agent.registration import Registration
from elastic.store.leader_watch import LeaderWatch
from elastic.store.lease_keeper import boot_time_s

_LOOK_S = 0.5


class LeaderOnceRegistered:
    """Knows the leader, but of nobody before this node has its name: see LeaderSource."""

    def __init__(self, watch: LeaderWatch) -> None:
        self._watch = watch
        self.registered = asyncio.Event()

    async def newer(self, than: Any = None) -> Leader:
        """The first leader known that is not `than`."""
        await self.registered.wait()
        return await self._watch.newer(than)


async def watch_isolation(
    registration: Registration,
    *,
    timeout_s: float,
    in_contact: Callable[[], bool],
    cut_off: Callable[[float], None],
) -> None:
    """Call `cut_off` once whenever neither store nor coordinator were heard of for `timeout_s`.

    The others may then take this node's group for dead, and form another one without it.
    """
    heard_at, told = boot_time_s(), False
    while True:
        await asyncio.sleep(_LOOK_S)
        now = boot_time_s()
        heard_at = max(heard_at, registration.renewed_at_s, now if in_contact() else 0.0)
        silent_s = now - heard_at
        if silent_s < timeout_s:
            told = False
        elif not told:
            told = True
            cut_off(silent_s)
