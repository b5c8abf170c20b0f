"""Traces are as Perfetto needs them: slices nest, and arrows begin and end in slices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.cli.trace import ChromeTrace, Slice, Track
from tests.chrome_trace import check_trace

AT = 1.75e9


def part(began: float, ended: float, *parts: Slice) -> Slice:
    return Slice(name="x", category="c", began=AT + began, ended=AT + ended, parts=parts)


def made(*slices: Slice) -> tuple[ChromeTrace, Track]:
    trace = ChromeTrace()
    track = trace.track(1, 1, process="p", name="t")
    trace.lay(track, slices)
    return trace, track


def of(trace: ChromeTrace, phase: str) -> list[dict[str, Any]]:
    document = trace.to_document()
    check_trace(document)
    json.dumps(document, allow_nan=False)
    return [e for e in document["traceEvents"] if e["ph"] == phase]


def test_parts_lie_inside_their_slice_one_after_the_other() -> None:
    trace, _ = made(part(0.0, 1.0, part(0.0, 0.4), part(0.3, 0.6), part(0.6, 2.0)))
    spans = [(round(e["ts"]), round(e["dur"])) for e in of(trace, "X")]
    assert spans == [(0, 1000000), (0, 400000), (400000, 200000), (600000, 400000)]


def test_a_slice_ends_where_the_next_one_begins() -> None:
    trace, _ = made(part(0.5, 1.0), part(0.0, 0.7), part(0.3, 0.3))
    assert [(e["ts"], e["dur"]) for e in of(trace, "X")] == [(0.0, 5e5), (5e5, 5e5)]


def test_an_arrow_begins_and_ends_in_slices() -> None:
    trace, track = made(part(0.0, 1.0), part(2.0, 3.0))
    empty = trace.track(2, 1, process="q", name="t")
    trace.flow("why", [(track, AT + 1.5), (empty, AT + 2.0), (track, AT + 2.5)])
    (start,), (end,) = of(trace, "s"), of(trace, "f")
    assert start["ts"] == 5e5
    assert (end["ts"], end["bp"]) == (2.5e6, "e")


def test_an_arrow_that_begins_outside_any_slice_is_omitted() -> None:
    trace, track = made(part(1.0, 2.0))
    trace.flow("why", [(track, AT), (track, AT + 1.5)])
    assert of(trace, "s") == []


spans = st.tuples(st.floats(0, 100), st.floats(0, 50)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.lists(st.tuples(spans, st.lists(spans, max_size=4)), max_size=12), st.data())
def test_any_slices_on_a_track_nest(found: list[Any], data: st.DataObject) -> None:
    trace, track = made(*(part(*span, *(part(*p) for p in parts)) for span, parts in found))
    for _ in range(3):
        stations = [(track, AT + data.draw(st.floats(0, 150))) for _ in range(3)]
        trace.flow("f", stations)
    check_trace(trace.to_document())


def test_check_trace_finds_a_slice_that_sticks_out() -> None:
    trace, track = made(part(0.0, 1.0))
    trace._slice(track, part(0.5, 1.5), AT + 0.5, AT + 1.5)
    with pytest.raises(AssertionError, match="sticks out"):
        check_trace(trace.to_document())
