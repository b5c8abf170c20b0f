"""Makes a run's directory anew when somebody has removed it under the run.

That of a user's session goes when the user logs out, which a job in the background outlives; and
there are those who tidy up /tmp. A worker that is started then would find nobody.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Protocol

from elastic.errors import ElasticError
from elastic.runtime.journal import Journal
from elastic.runtime.off_loop import off_loop

_LOOK_S = 2.0


class Directory(Protocol):
    """A RunDirectory or a NodeDirectory."""

    def lacks(self, *names: str) -> bool:
        """One of these files is gone, or all of it."""
        ...

    def make_anew(self) -> None:
        """What has been removed."""
        ...


async def make_anew_when_lost(
    directory: Directory,
    sockets: tuple[str, ...],
    listen: Callable[[], Awaitable[str]],
    journal: Journal,
) -> None:
    """Until cancelled: when one of these is gone, make the directory anew and have `listen` do the
    same with the sockets; it returns where they are."""
    told = ""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            if not await off_loop(functools.partial(directory.lacks, *sockets)):
                continue
            directory.make_anew()  # on the loop: others change the process's umask there
            path = await listen()
        except (OSError, RuntimeError, ElasticError) as error:  # tried again
            if str(error) != told:
                told = str(error)
                journal.record("run_directory_lost", reason=told)
        else:
            told = ""
            journal.record("run_directory_made_anew", path=path)
