"""Builds a document in Chrome's Trace Event Format, which Perfetto and chrome://tracing show.

Source: "Trace Event Format" of the catapult project,
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Instants are given in Unix seconds, and are microseconds since the begin of the trace in it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Track:
    """A line of the picture: a thread of a process, in the words of the format."""

    pid: int
    tid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Something that took time."""

    name: str
    category: str
    began: float
    ended: float
    args: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Slice] = ()
    """What it consists of, one after the other."""


class ChromeTrace:
    """Slices of a track must not overlap: `lay` takes care of it."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._named: set[tuple[str, int, int]] = set()
        self._laid: dict[Track, list[tuple[float, float]]] = {}
        self._began: float | None = None
        self._flows = 0

    def track(self, pid: int, tid: int, *, process: str, name: str) -> Track:
        """Name a track, and the process that it belongs to; both are shown by their numbers."""
        for kind, label, key in (
            ("process_name", process, 0),
            ("process_sort_index", pid, 0),
            ("thread_name", name, tid),
            ("thread_sort_index", tid, tid),
        ):
            value = {"sort_index": label} if kind.endswith("index") else {"name": label}
            event = {"ph": "M", "name": kind, "pid": pid, "tid": key, "args": value}
            if (kind, pid, key) not in self._named:
                self._named.add((kind, pid, key))
                self._events.append(event)
        return Track(pid, tid)

    def lay(self, track: Track, slices: Sequence[Slice]) -> None:
        """Slices one after the other: one that reaches into the next one, as where clocks differ,
        ends with its begin. Called once for a track."""
        ordered = [s for s in slices if s.ended - s.began >= _LEAST_S]
        ordered.sort(key=lambda s: s.began)
        laid: list[tuple[float, float]] = []
        next_at = [*(s.began for s in ordered[1:]), math.inf]
        for this, following_at in zip(ordered, next_at, strict=False):
            ended = min(this.ended, following_at)
            if ended - this.began < _LEAST_S:
                continue
            self._slice(track, this, this.began, ended)
            laid.append((this.began, ended))
        self._laid[track] = laid

    def instant(self, track: Track, name: str, at: float, args: Mapping[str, Any]) -> None:
        """Something that happened."""
        self._add(track, "i", name, "event", at, {"s": "t", "args": dict(args)})

    def flow(self, name: str, stations: Sequence[tuple[Track, float]]) -> None:
        """An arrow from slice to slice, from the cause to the effect: at each station from the
        slice that is there at that time, or else the one before. Stations without one, or before
        the station before, are passed over."""
        found: list[tuple[Track, float]] = []
        for track, wanted in stations:
            at = self._within(track, wanted)
            if at is not None and (not found or at >= found[-1][1]):
                found.append((track, at))
        if len(found) < 2:
            return
        self._flows += 1
        for number, (track, at) in enumerate(found):
            kind = "s" if number == 0 else "f" if number == len(found) - 1 else "t"
            more = {"id": self._flows, **({"bp": "e"} if kind == "f" else {})}
            self._add(track, kind, name, "flow", at, more)

    def to_document(self, **other: Any) -> dict[str, Any]:
        """As JSON values. other: what else is to be known of the trace."""
        begin = self._began or 0.0
        events = [
            {**event, "ts": round((event["ts"] - begin) * 1e6, 3)} if "ts" in event else event
            for event in self._events
        ]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"begin_unix_s": begin, **other},
        }

    def _slice(self, track: Track, this: Slice, began: float, ended: float) -> None:
        more = {"dur": round((ended - began) * 1e6, 3), "args": dict(this.args)}
        self._add(track, "X", this.name, this.category, began, more)
        at = began
        for part in this.parts:
            begins, ends = max(at, part.began), min(ended, part.ended)
            if ends - begins >= _LEAST_S:
                self._slice(track, part, begins, ends)
                at = ends

    def _add(
        self, track: Track, kind: str, name: str, category: str, at: float, more: dict[str, Any]
    ) -> None:
        self._began = at if self._began is None else min(self._began, at)
        event = {"ph": kind, "name": name, "cat": category, "ts": at}
        self._events.append({**event, "pid": track.pid, "tid": track.tid, **more})

    def _within(self, track: Track, at: float) -> float | None:
        """The instant, if a slice is there; else the last one of the slice before."""
        laid = self._laid.get(track, [])
        number = bisect.bisect_right(laid, (at, math.inf)) - 1
        if number < 0:
            return None
        began, ended = laid[number]
        return min(at, (began + ended) / 2 if at > ended else ended - _LEAST_S / 2)
