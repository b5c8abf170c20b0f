"""The agent's ties to a job of many nodes: its name, its leader, and how long it may do without."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.agent.coordinator_link import Leader
from elastic.agent.registration import Registration
from elastic.runtime.off_loop import off_loop
from elastic.store.leader_watch import LeaderWatch
from elastic.store.lease_keeper import boot_time_s

_LOOK_S = 0.5


class LastContact:
    """When this node has last heard of the store or a coordinator, for the agent that comes after
    one that was killed. Seconds since the machine started."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def last(self) -> float | None:
        """None if it is not known, or of before the machine was started."""
        try:
            boot, at_s = self._path.read_text(encoding="ascii").split()
            heard_at = float(at_s)
            return heard_at if boot == _boot() and heard_at <= boot_time_s() else None
        except (OSError, ValueError):
            return None

    def note(self, at_s: float) -> None:
        """Keep it. What cannot be kept is not known to the next agent, as before."""
        with contextlib.suppress(OSError):
            self._path.write_text(f"{_boot()} {at_s:.3f} ", encoding="ascii")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


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
    contact: LastContact,
    goes_on: bool,
) -> None:
    """Call `cut_off` once whenever neither store nor coordinator were heard of for `timeout_s`.

    The others may then take this node's group for dead, and form another one without it. So the
    time counts on from agent to agent, as `contact` keeps it, where one `goes_on` with the workers
    of the one before.
    """
    before = contact.last() if goes_on else None
    heard_at, told = boot_time_s() if before is None else before, False
    noted_at = before
    noting: asyncio.Future[None] | None = None
    while True:
        await asyncio.sleep(_LOOK_S)
        now = boot_time_s()
        heard_at = max(heard_at, registration.renewed_at_s, now if in_contact() else 0.0)
        if noted_at != heard_at and (noting is None or noting.done()):
            # Beside the loop, and waited for by nobody: a disk that hangs must not keep this node
            # from being cut off. An older note only makes the next agent more careful.
            noted_at = heard_at
            noting = asyncio.ensure_future(off_loop(functools.partial(contact.note, noted_at)))
        silent_s = now - heard_at
        if silent_s < timeout_s:
            told = False
        elif not told:
            told = True
            cut_off(silent_s)
