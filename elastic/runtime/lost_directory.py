"""Makes a run's directory again if it is removed while the run goes on.

A directory in the user's session is removed when the user logs out, and a job in the background
outlives that. Other programs clean up /tmp. A worker that is started then could not connect.
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

    def is_incomplete(self, *names: str) -> bool:
        """Return whether the directory or one of these files in it is gone. May block."""
        ...

    def restore(self) -> None:
        """Make what was removed, perhaps at another place. Raises OSError, ConfigurationError."""
        ...


async def restore_when_lost(
    directory: Directory,
    sockets: tuple[str, ...],
    listen: Callable[[], Awaitable[str]],
    journal: Journal,
) -> None:
    """Watch the directory and its `sockets` until cancelled, and make it again if one is gone. Then
    `listen` makes the sockets again and returns the path for the journal."""
    reported = ""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            if not await off_loop(functools.partial(directory.is_incomplete, *sockets)):
                continue
            directory.restore()  # on the loop, where others change the umask
            path = await listen()
        except (OSError, RuntimeError, ElasticError) as error:  # the next round tries again
            if str(error) != reported:
                reported = str(error)
                journal.record("run_directory_lost", reason=reported)
        else:
            reported = ""
            journal.record("run_directory_made_anew", path=path)
