"""That a job has ended, for coordinators and agents that were not told by its leader."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

from elastic.errors import ExitCode
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Guard, Store
from elastic.store.job_keys import JobKeys
from elastic.store.retries import until_answered

_MOST_EXIT_CODE = 255


class JobEnds:
    """`start`, then wait for `next_end`: an end that comes after the start, not one long past."""

    def __init__(self, store: Store, *, job: str) -> None:
        self._store = store
        self._key = JobKeys(job).ended
        self._past = 0

    async def start(self) -> None:
        """Note what is past; sits out outages. Raises ConfigurationError if the store does."""
        entry = await until_answered(lambda: self._store.get(self._key), f"get {self._key!r}")
        self._past = entry.modified if entry is not None else 0

    async def next_end(self) -> int:
        """The exit code of the job; waits until it has ended."""
        async with aclosing(follow_key(self._store, self._key)) as entries:
            async for entry in entries:
                if entry is not None and entry.modified > self._past:
                    return _exit_code(entry)
        return await asyncio.Future()


async def announce_end(store: Store, *, job: str, guard: Guard, exit_code: int) -> None:
    """Say it, and forget the group of which nothing runs any more, so that the next job of this
    name begins anew. Raises GuardFailed and TransientError.
    """
    keys = JobKeys(job)
    await store.put(keys.ended, json.dumps({"exit_code": exit_code}).encode(), guard=guard)
    await store.delete(keys.generation, guard=guard)
    await store.delete(keys.incarnation, guard=guard)


def _exit_code(entry: Entry) -> int:
    """Of what can not be read it is known that the job has ended, and no more."""
    try:
        code = json.loads(entry.value)["exit_code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return int(ExitCode.SCRIPT_FAILED)
    if type(code) is not int or not 0 <= code <= _MOST_EXIT_CODE:
        return int(ExitCode.SCRIPT_FAILED)
    return code
