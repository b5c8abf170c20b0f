"""Checks documents in Chrome's Trace Event Format: schema, named tracks, nesting and flows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jsonschema

_NUMBER = {"type": "number", "minimum": 0}
_PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}}
_COMMON = {
    **_PLACE,
    "name": {"type": "string", "minLength": 1},
    "cat": {"type": "string"},
    "ts": _NUMBER,
    "args": {"type": "object"},
}


def _event(phase: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**_COMMON, "ph": {"const": phase}, **properties},
        "required": ["ph", "name", "pid", "tid", *required],
        "additionalProperties": False,
    }


_METADATA = {
    "type": "object",
    "properties": {
        **_PLACE,
        "ph": {"const": "M"},
        "name": {
            "enum": ["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
        },
        "args": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "sort_index": {"type": "integer"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
    },
    "required": ["ph", "name", "pid", "tid", "args"],
    "additionalProperties": False,
}
_ID = {"type": ["integer", "string"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _METADATA,
                    _event("X", ["ts", "dur"], dur=_NUMBER),
                    _event("i", ["ts", "s"], s={"enum": ["g", "p", "t"]}),
                    _event("s", ["ts", "id", "cat"], id=_ID),
                    _event("t", ["ts", "id", "cat"], id=_ID),
                    _event("f", ["ts", "id", "cat", "bp"], id=_ID, bp={"const": "e"}),
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}
"""The format's object form, restricted to the kinds of events that elastic writes. Their fields are
those of the format's description."""
_ROUNDING_US = 0.01


def check_trace(document: dict[str, Any]) -> None:
    """Raises AssertionError or jsonschema's ValidationError if the document is wrong."""
    jsonschema.validate(document, SCHEMA)
    events = document["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in named, "a track without a name"
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        check_nesting(spans)
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for stations in flows.values():
        phases = "".join(e["ph"] for e in stations)
        assert phases == "s" + "t" * (len(phases) - 2) + "f", phases
        assert [e["ts"] for e in stations] == sorted(e["ts"] for e in stations)
        for e in stations:
            spans = slices[e["pid"], e["tid"]]
            assert any(a - _ROUNDING_US <= e["ts"] <= b + _ROUNDING_US for a, b in spans), e


def check_nesting(spans: list[tuple[float, float]]) -> None:
    """Check that slices of one track are inside of each other or beside each other."""
    above: list[float] = []
    for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while above and above[-1] <= began + _ROUNDING_US:
            above.pop()
        assert not above or ended <= above[-1] + _ROUNDING_US, f"{began} to {ended} sticks out"
        above.append(ended)
