"""Warnings that modules log become entries of the journal, each at most every few seconds."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from elastic.runtime.journal import Journal

_EVERY_S = 10.0
_MOST_REMEMBERED = 1000


class JournalHandler(logging.Handler):
    """Takes what is logged. What differs only in its last argument is the same."""

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal
        self._clock = clock
        self._told_at: dict[tuple[object, ...], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Record it unless it was recorded just now."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        key = (record.name, record.msg, *map(str, arguments[:-1]))
        now = self._clock()
        if now - self._told_at.get(key, -_EVERY_S) < _EVERY_S:
            return
        if len(self._told_at) >= _MOST_REMEMBERED:
            self._told_at.clear()
        self._told_at[key] = now
        source = record.name.removeprefix("elastic.")
        fields = {"message": record.getMessage()}
        if record.exc_info is not None and (error := record.exc_info[1]) is not None:
            fields["message"] += f": {type(error).__name__}: {error}"
            fields["traceback"] = "".join(traceback.format_exception(error))
        self._journal.record("warning", source=source, **fields)


def warnings_to(journal: Journal) -> None:
    """From now on, for this process; also what the event loop says, which else would be written in
    between the events."""
    handler = JournalHandler(journal)
    for name in ("elastic", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
