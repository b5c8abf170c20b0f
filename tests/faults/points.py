"""Defines points, each a call that fails, and draws them from all calls of a job."""

from __future__ import annotations

import errno
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

FUNCTIONS = (
    *("fork", "thread", "open", "read", "write", "fsync", "rename", "mkdir"),
    *("socket", "connect", "accept", "send", "recv", "pipe", "epoll", "mmap"),
)
"""In the order of their counters in failing_calls.c."""
COUNTED_ROLES = ("run", "coordinator", "agent", "keeper", "zygote", "worker", "writer")
"""The roles that failing_calls.c knows, in its order."""
ROLES = ("run", "keeper", "zygote", "worker", "writer")
"""The roles in a job of `elastic run`."""
ERRORS = {
    "fork": (errno.EAGAIN, errno.ENOMEM),
    "thread": (errno.EAGAIN,),
    "open": (errno.EMFILE, errno.ENOSPC, errno.EIO, errno.EACCES),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.ENOSPC, errno.EIO),
    "mkdir": (errno.ENOSPC, errno.EACCES),
    "socket": (errno.EMFILE, errno.ENFILE),
    "connect": (errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EADDRNOTAVAIL),
    "accept": (errno.EMFILE, errno.ENFILE),
    "send": (errno.ECONNRESET,),
    "recv": (errno.ECONNRESET,),
    "pipe": (errno.EMFILE, errno.ENFILE),
    "epoll": (errno.EMFILE,),
    "mmap": (errno.ENOMEM,),
}
_FIRST = 24  # half of the points are among the first calls of a kind: those of a start all differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The `number`-th call (from 1) of `function` in the first process of `role` that gets there
    fails with `error`.

    since_kill: count in the live process of this role, from just before a worker of a training job
    is killed, instead of from the start of a process.
    """

    role: str
    function: str
    number: int
    error: int
    since_kill: bool = False

    def __str__(self) -> str:
        number = f"{'+' if self.since_kill else ''}{self.number}"
        return f"{self.role}:{self.function}:{number}:{errno.errorcode[self.error]}"

    @classmethod
    def parse(cls, text: str) -> Point:
        role, function, number, error = text.split(":")
        assert role in COUNTED_ROLES, role
        assert function in FUNCTIONS, function
        return cls(
            role=role,
            function=function,
            number=int(number),
            error=getattr(errno, error),
            since_kill=number.startswith("+"),
        )


Counts = Mapping[tuple[str, str], int]
"""The most calls of a function by one process of a role in the life of a job."""


def drawn(counts: Counts, seed: int, *, since_kill: Collection[str] = ()) -> Iterator[Point]:
    """Endless points, spread over roles and functions, then over the calls of each.

    since_kill: the roles whose calls are counted from the kill of a worker.
    """
    source = random.Random(seed)
    kinds = sorted(kind for kind, count in counts.items() if count)
    while True:
        source.shuffle(kinds)
        for role, function in kinds:
            count = counts[role, function]
            most = min(count, _FIRST) if source.random() < 0.5 else count
            yield Point(
                role=role,
                function=function,
                number=source.randint(1, most),
                error=source.choice(ERRORS[function]),
                since_kill=role in since_kill,
            )
