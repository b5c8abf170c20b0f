"""What happened reaches every listener, as one line of JSON where it is written."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from collections.abc import AsyncIterator

import pytest

from elastic.runtime.journal import Entry, Journal, JsonLines, RecentEntries


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


def test_json_lines() -> None:
    stream = io.StringIO()
    lines = JsonLines(stream, quiet=frozenset({"progress"}))
    lines(Entry(unix_s=1.23456789, name="progress", fields={}))
    lines(Entry(unix_s=1.23456789, name="failed", fields={"traceback": "a\nb", "rank": None}))
    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue()) == {
        "time": 1.234568,
        "event": "failed",
        "traceback": "a\nb",
        "rank": None,
    }


def test_what_stands_in_a_field_is_never_in_the_way_of_the_line() -> None:
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


def lines(*names: str) -> list[str]:
    return [entry(name).to_json() for name in names]


def entry(name: str) -> Entry:
    return Entry(unix_s=1.0, name=name, fields={})


async def taken(entries: AsyncIterator[str], count: int) -> list[str]:
    return [await asyncio.wait_for(anext(entries), 10) for _ in range(count)]


def test_the_newest_entries_are_remembered_without_progress() -> None:
    async def check() -> None:
        recent = RecentEntries(most=2)
        for name in ("a", "b", "progress", "c"):
            recent(entry(name))
        assert [line async for line in recent.remembered()] == lines("b", "c")
        assert [line async for line in recent.remembered()] == lines("b", "c")

    asyncio.run(check())


def test_who_follows_hears_what_was_and_what_comes_progress_included() -> None:
    async def check() -> None:
        recent = RecentEntries()
        recent(entry("a"))
        one, two = recent.follow(), recent.follow()
        assert await taken(one, 1) == lines("a")
        for name in ("progress", "b"):
            recent(entry(name))
        assert await taken(one, 2) == lines("progress", "b")
        assert await taken(two, 2) == lines("a", "b")  # it looked later
        recent(entry("c"))
        for followed in (one, two):
            assert await taken(followed, 1) == lines("c")
            await followed.aclose()  # type: ignore[attr-defined]
        assert not recent._followers

    asyncio.run(check())


def test_who_does_not_read_loses_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.runtime.journal._MOST_BEHIND", 2)

    async def check() -> None:
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

    asyncio.run(check())
