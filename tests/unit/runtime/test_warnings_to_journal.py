"""Logged warnings reach the journal, and an outage does not flood it."""

from __future__ import annotations

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
    logger = logging.getLogger("elastic")
    before = logger.handlers, logger.propagate
    yield logging.getLogger("elastic.store.retries")
    logger.handlers, logger.propagate = before


def test_a_warning_is_an_entry_with_its_source(entries: list[Entry], log: logging.Logger) -> None:
    warnings_to(Journal(entries.append))
    log.warning("%s: trying again: %s", "get 'a'", "etcd at x:1 refused")
    (entry,) = entries
    assert entry.name == "warning"
    assert entry.fields == {
        "source": "store.retries",
        "message": "get 'a': trying again: etcd at x:1 refused",
    }


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
