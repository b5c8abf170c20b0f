"""What happened reaches every listener, as one line of JSON where it is written."""

from __future__ import annotations

import io
import json
import time

from elastic.runtime.journal import Entry, Journal, JsonLines


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
