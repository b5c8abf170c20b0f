"""Journal entries and logged warnings reach every listener, as one line of JSON each where they are
written. Repeated warnings are limited, so that an outage does not flood the journal."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from elastic.runtime.journal import (
    Entry,
    Journal,
    JournalHandler,
    JsonLines,
    RecentEntries,
    warnings_to,
)


def test_entries_reach_every_listener_in_order() -> None:
    first: list[Entry] = []
    second: list[Entry] = []
    journal = Journal(first.append, second.append)
    before = time.time()
    journal.record("node_lost", node="n1")
    journal.record("recovered", total_s=0.5, name="a field may have this name")
    assert first == second
    assert [(e.name, dict(e.fields)) for e in first] == [
        ("node_lost", {"node": "n1"}),
        ("recovered", {"total_s": 0.5, "name": "a field may have this name"}),
    ]
    assert before <= first[0].unix_s <= first[1].unix_s <= time.time()


def test_a_listener_that_raises_is_told_no_more_and_stops_nobody() -> None:
    told: list[str] = []

    def fails(entry: Entry) -> None:
        told.append(entry.name)
        raise ZeroDivisionError("by zero")

    entries: list[Entry] = []
    journal = Journal(fails, entries.append)
    journal.record("elected")
    journal.record("deposed")
    assert told == ["elected"]
    assert [e.name for e in entries] == ["warning", "elected", "deposed"]
    assert "is told no more events: ZeroDivisionError: by zero" in entries[0].fields["message"]


def test_json_lines_writes_one_line_per_entry_and_omits_quiet_ones() -> None:
    stream = io.StringIO()
    lines = JsonLines(stream, quiet=frozenset({"progress"}))
    lines(Entry(unix_s=1.23456789, name="progress", fields={}))
    lines(Entry(unix_s=1.23456789, name="failed", fields={"traceback": "a\nb", "rank": None}))
    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue()) == {
        "time": 1.234568,
        "event": "failed",
        "severity": "info",
        "traceback": "a\nb",
        "rank": None,
    }


def test_any_field_values_give_a_valid_json_line() -> None:
    reported = {"loss": math.nan, "step": 3, "best": {"accuracy": -math.inf, "of": [1.0, math.inf]}}
    fields = {"time": "noon", "event": "job_ended", "reported": reported, "odd": object}
    found = json.loads(Entry(unix_s=1.0, name="progress", fields=fields).to_json())
    assert (found["time"], found["event"]) == (1.0, "progress")
    assert found["reported"] == {
        "loss": None,
        "step": 3,
        "best": {"accuracy": None, "of": [1.0, None]},
    }
    assert found["non_finite"] == ["reported.loss", "reported.best.accuracy", "reported.best.of.1"]


def test_a_node_that_leaves_as_wanted_is_no_warning() -> None:
    entries = [Entry(unix_s=1.0, name="node_lost", fields={"as_wanted": w}) for w in (True, False)]
    assert [entry.severity for entry in entries] == ["info", "warning"]


def test_every_line_has_its_origin_and_severity() -> None:
    stream = io.StringIO()
    origin = {"job": "digits", "run": "second", "node": "n1"}
    journal = Journal(JsonLines(stream), origin=origin)
    journal.record("agent_started", job="digits", run_id="second")
    journal.record("warning", source="x", message="y")
    journal.record("worker_failed", node="another")
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["severity"] for line in found] == ["info", "warning", "error"]
    assert [line["node"] for line in found] == ["n1", "n1", "another"]
    assert {(line["job"], line["run"]) for line in found} == {("digits", "second")}


@pytest.mark.parametrize(
    ("exit_code", "severity"), [(82, "info"), (143, "info"), (1, "error"), (84, "error")]
)
def test_a_job_end_is_an_error_unless_it_was_requested(exit_code: int, severity: str) -> None:
    ended = Entry(unix_s=1.0, name="job_ended", fields={"exit_code": exit_code})
    assert ended.severity == severity


def lines(*names: str) -> list[str]:
    return [entry(name).to_json() for name in names]


def entry(name: str) -> Entry:
    return Entry(unix_s=1.0, name=name, fields={})


async def taken(entries: AsyncIterator[str], count: int) -> list[str]:
    return [await asyncio.wait_for(anext(entries), 10) for _ in range(count)]


async def test_the_newest_entries_are_remembered_without_progress() -> None:
    recent = RecentEntries(most=2)
    for name in ("a", "b", "progress", "c"):
        recent(entry(name))
    assert [line async for line in recent.remembered()] == lines("b", "c")
    assert [line async for line in recent.remembered()] == lines("b", "c")


async def test_a_follower_gets_earlier_and_new_entries_including_progress() -> None:
    recent = RecentEntries()
    recent(entry("a"))
    one, two = recent.follow(), recent.follow()
    assert await taken(one, 1) == lines("a")
    for name in ("progress", "b"):
        recent(entry(name))
    assert await taken(one, 2) == lines("progress", "b")
    assert await taken(two, 2) == lines("a", "b")  # its first read came later
    recent(entry("c"))
    for followed in (one, two):
        assert await taken(followed, 1) == lines("c")
        await followed.aclose()  # type: ignore[attr-defined]
    assert not recent._followers


async def test_a_follower_that_does_not_read_loses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.runtime.journal._MOST_BEHIND", 2)
    recent = RecentEntries()
    recent(entry("first"))
    slow = recent.follow()
    assert await taken(slow, 1) == lines("first")
    for name in ("a", "b", "c"):
        recent(entry(name))
    assert await taken(slow, 2) == lines("a", "b")
    recent(entry("d"))
    assert await taken(slow, 1) == lines("d")
    await slow.aclose()  # type: ignore[attr-defined]


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


def test_an_error_logged_by_asyncio_is_an_entry_that_names_the_cause(
    entries: list[Entry], log: logging.Logger
) -> None:
    """For example when accept() fails. The traceback stays in a field of its own."""
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


def test_a_repeated_warning_is_recorded_every_ten_seconds(entries: list[Entry]) -> None:
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
