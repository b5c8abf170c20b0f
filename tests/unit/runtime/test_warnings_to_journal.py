"""Logged warnings reach the journal, and an outage does not flood it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import pytest

from elastic.runtime.journal import Entry, Journal
from elastic.runtime.warnings_to_journal import JournalHandler, warnings_to


@pytest.fixture
def entries() -> list[Entry]:
    return []


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    loggers = [logging.getLogger(name) for name in ("elastic", "asyncio")]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    yield logging.getLogger("elastic.store.retries")
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate


def test_a_warning_is_an_entry_with_its_source(entries: list[Entry], log: logging.Logger) -> None:
    warnings_to(Journal(entries.append))
    log.warning("%s: trying again: %s", "get 'a'", "etcd at x:1 refused")
    (entry,) = entries
    assert entry.name == "warning"
    assert entry.fields == {
        "source": "store.retries",
        "message": "get 'a': trying again: etcd at x:1 refused",
    }


def test_what_the_event_loop_says_is_an_entry_that_names_the_cause(
    entries: list[Entry], log: logging.Logger
) -> None:
    """As that of a socket that cannot be accepted, with a traceback that stays beside it."""
    del log
    warnings_to(Journal(entries.append))
    error = OSError(errno.ENFILE, "Too many open files in system")
    logging.getLogger("asyncio").error("accept() failed", exc_info=error)
    (entry,) = entries
    assert entry.fields["source"] == "asyncio"
    assert entry.fields["message"].startswith("accept() failed: OSError: ")
    assert entry.fields["message"].endswith("Too many open files in system")
    assert "Traceback" not in entry.fields["message"]
    assert "OSError" in entry.fields["traceback"]


def test_the_same_again_is_told_every_ten_seconds(entries: list[Entry]) -> None:
    now = 0.0
    handler = JournalHandler(Journal(entries.append), clock=lambda: now)

    def warn(what: str, why: str) -> None:
        record = logging.LogRecord("elastic.x", logging.WARNING, "", 0, "%s: %s", (what, why), None)
        handler.handle(record)

    warn("get", "first")
    warn("get", "second")
    warn("put", "first")
    assert [e.fields["message"] for e in entries] == ["get: first", "put: first"]
    now = 10.0
    warn("get", "third")
    assert entries[-1].fields["message"] == "get: third"
