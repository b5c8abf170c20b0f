"""The lease under which a node's workers train: one page of memory that all its processes map.

The other nodes may form a group without this node once they have not heard from it for the
isolation time and a margin. So its workers may begin a step only until the isolation time is over,
counted from the *sending* of the last request that the store or a coordinator answered. The agent
writes that instant here. Three processes read it, and none depends on another that may be stopped:
a worker begins no step and commits none after it; the agent does not renew a lease that lapsed for
longer than `LAPSE_S`; the keeper ends the workers then.

Workers note their newest commit on the page, so that it is known how many steps were lost with
them, however they end.

Times are seconds of CLOCK_BOOTTIME, which counts the time in which the machine is suspended.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from pathlib import Path

from elastic.errors import Stranded

LAPSE_S = 1.5
"""Seconds for which a lease that was not renewed in time can still be renewed. A worker that waits
goes on then. Afterwards the lease is over for good, and the workers that have it are ended."""

_NAME = "elastic-lease"
_LINK = f"/memfd:{_NAME}"
_EPOCH, _UNTIL, _GENERATION, _COMMITTED = range(4)
_NOT_GRANTED = 0.0
_LOOK_S = 0.01
_BOOT_CLOCK = time.CLOCK_BOOTTIME


class TrainingLease:
    """A node's lease. One agent writes it, and any process that maps it reads it.

    Each lease has an epoch. When it is over, the next epoch begins, and only workers that were
    started in that one may train under it: however late a process wakes up, a lease that was
    granted meanwhile is not its own.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor of the page, from `new` or inherited. Raises OSError."""
        self.descriptor = descriptor
        page = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE))
        self._page: memoryview[float] = page.cast("d")

    @classmethod
    def new(cls) -> TrainingLease:
        """Make a page; its first epoch is not granted. Raises OSError."""
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        lease = cls(descriptor)
        lease._page[_EPOCH] = 1.0
        return lease

    @classmethod
    def unlimited(cls) -> TrainingLease:
        """Make the page of a node beside which no other group can be formed."""
        lease = cls.new()
        lease.grant(math.inf)
        return lease

    @classmethod
    def of_process(cls, pid: int) -> TrainingLease | None:
        """Map the page of another process of this user. None if it has none, or is gone."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(entry).startswith(_LINK):
                        return cls(os.open(entry, os.O_RDWR | os.O_CLOEXEC))
        return None

    @property
    def epoch(self) -> int:
        return int(self._page[_EPOCH])

    @property
    def valid_until(self) -> float | None:
        """None: this epoch's lease was not granted yet."""
        until = self._page[_UNTIL]
        return until if until != _NOT_GRANTED else None

    @property
    def newest_commit(self) -> tuple[int, int]:
        """(generation, committed steps) of the newest step that a worker of this node has
        committed; zeros before the first."""
        return int(self._page[_GENERATION]), int(self._page[_COMMITTED])

    def is_over(self, now: float) -> bool:
        """Whether the lease was granted, and has lapsed for so long that it cannot be renewed."""
        until = self._page[_UNTIL]
        return until != _NOT_GRANTED and now >= until + LAPSE_S

    def share(self) -> WorkerLease:
        """The lease of a worker that is started now."""
        return WorkerLease(self._page)

    # ---- for the agent

    def grant(self, until: float) -> None:
        self._page[_UNTIL] = until

    def begin_epoch(self) -> None:
        """End this epoch. In this order: nobody may see an instant of the one in the other."""
        self._page[_UNTIL] = _NOT_GRANTED
        self._page[_EPOCH] += 1.0


class WorkerLease:
    """What one worker sees of its node's lease. Cheap enough for every step."""

    def __init__(self, page: memoryview[float]) -> None:
        self._page = page
        self._epoch: float = page[_EPOCH]

    def holds(self) -> bool:
        """Whether a step may begin, or be committed, now."""
        page = self._page  # read the instant first: the epoch changes before another is granted
        return time.clock_gettime(_BOOT_CLOCK) < page[_UNTIL] and page[_EPOCH] == self._epoch

    def wait(self) -> None:
        """Return once it holds: until then, the others may form a group without this node. The
        worker stays as it is and gives signs of life. Raises Stranded if the lease is over."""
        while not self.holds():
            if self.is_over():
                raise Stranded(
                    "the node of this worker was out of contact for longer than "
                    "--isolation-timeout-s, so the job may have gone on without it"
                )
            time.sleep(_LOOK_S)

    def note_commit(self, generation: int, committed: int) -> None:
        """Note a commit. Another worker of this node may have noted it, or a later one, already."""
        page = self._page
        if page[_COMMITTED] < committed or page[_GENERATION] != generation:
            page[_GENERATION], page[_COMMITTED] = generation, committed

    def is_over(self) -> bool:
        """Whether this worker can never train again."""
        return bool(self._page[_EPOCH] != self._epoch)
