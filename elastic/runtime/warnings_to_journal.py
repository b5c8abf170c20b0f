"""Warnings that modules log become entries of the journal, each at most every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elastic.runtime.journal import Journal

_EVERY_S = 10.0
_MOST_REMEMBERED = 1000


class JournalHandler(logging.Handler):
    """Takes what is logged below "elastic". What differs only in its last argument is the same."""

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
        self._journal.record("warning", source=source, message=record.getMessage())


def warnings_to(journal: Journal) -> None:
    """From now on, for this process."""
    logger = logging.getLogger("elastic")
    logger.handlers = [JournalHandler(journal)]
    logger.propagate = False
