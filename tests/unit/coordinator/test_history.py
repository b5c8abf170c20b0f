"""The history that is kept for the page has what a person would look at, and is bounded."""

from __future__ import annotations

import json
import math
from typing import Any

from elastic.coordinator.history import MOST_ENTRIES, JobHistory
from elastic.core.curves import Sample
from elastic.core.histogram import STEP_BOUNDS_S, Histogram
from elastic.runtime.journal import Entry


class Past:
    """A history whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.history = JobHistory(lambda: self.now)

    def tell(self, name: str, **fields: Any) -> None:
        self.history(Entry(unix_s=self.now, name=name, fields=fields))


def test_only_the_newest_entries_of_those_that_matter_are_kept() -> None:
    past = Past()
    for n in range(10 * MOST_ENTRIES):
        past.tell("progress", step=n)
        past.tell("warning", source="x", message=f"{n}")
    kept = past.history.entries
    assert len(kept) == MOST_ENTRIES
    assert [e.number for e in kept][-1] == 10 * MOST_ENTRIES
    assert kept[-1].fields["message"] == f"{10 * MOST_ENTRIES - 1}"


def test_long_texts_are_cut_and_numbers_are_valid_json() -> None:
    past = Past()
    huge = {"message": "m" * 10**6, "traceback": "t" * 10**6 + "end", "log": "/l"}
    for n in range(30):
        past.tell("worker_failed", worker=f"w{n}", bytes=math.inf, lost=["a"] * 1000, **huge)
    newest = past.history.entries[-1]
    assert newest.detail.endswith("end")
    assert newest.fields["bytes"] is None
    assert sum(1 for e in past.history.entries if e.detail) == 10, "of the newest failures"
    whole = json.dumps([[e.fields, e.detail] for e in past.history.entries], allow_nan=False)
    assert len(whole) < 100_000


def test_a_node_that_is_lost_is_remembered_until_it_comes_back() -> None:
    past = Past()
    past.tell("node_lost", node="a")
    past.tell("node_lost", node="b", as_wanted=True)
    departed = past.history.departed
    assert (departed["a"].as_wanted, departed["b"].as_wanted) == (False, True)
    past.tell("node_connected", node="b", host="h", slots=1)
    past.tell("node_lost", node="b")
    assert not departed["b"].as_wanted
    for n in range(5000):
        past.tell("node_lost", node=f"n{n}")
    assert len(departed) <= 1000


def test_the_step_time_of_a_sample_covers_the_steps_since_the_sample_before() -> None:
    past, steps = Past(), Histogram(STEP_BOUNDS_S)
    for duration_s in (0.1, 0.1, 0.4, 0.4):
        steps.observe(duration_s)
        steps.observe(duration_s)
        past.now += 2.0
        past.history.sample(Sample(), steps)
    past.now += 2.0
    past.history.sample(Sample(), steps)
    rows = past.history.curves.curve("15m").rows
    assert [row[2] for row in rows] == [None, 0.1, 0.4, 0.4, None]


def test_a_group_that_lasts_only_a_moment_is_in_the_curve() -> None:
    past, steps = Past(), Histogram(STEP_BOUNDS_S)
    past.history.sample(Sample(world_size=3, wanted=3), steps)
    past.now += 0.5
    past.tell("generation_formed", generation=2, world_size=2, reason="member_lost")
    past.now += 0.5
    past.tell("generation_formed", generation=3, world_size=3, reason="member_joined")
    (row,) = past.history.curves.curve("15m").rows
    assert row[3:6] == (2, 3, 3)
