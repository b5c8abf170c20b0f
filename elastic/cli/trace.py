"""Makes a trace for Perfetto from a job's timeline: what each slot did, and what was decided."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.core.legible import is_representable_time
from elastic.v1 import timeline_pb2 as pb

_CONTROL = 1  # the pid of the coordinator's tracks; those of nodes begin at _FIRST_NODE
_FIRST_NODE = 10
_GENERATIONS, _INCIDENTS, _CHECKPOINTS, _DECISIONS = 1, 2, 3, 4
PHASES = ("detect", "persist", "notify", "join", "sync", "first_step")
"""The parts of a recovery, in order."""
_FOR_TRACKS = ("generation_formed", "checkpoint_committed", "recovered", "incident", "progress")
_LEAST_GAP_S = 1e-4  # a machine's clocks are read one after the other
_WHAT = pb.Stretch.What

Event = tuple[float, str, Mapping[str, Any]]


def build_trace(
    timeline: pb.JobTimeline,
    incidents: Sequence[Mapping[str, Any]],
    events: Iterable[Event],
    now: float,
) -> ChromeTrace:
    """events: (Unix seconds, name, fields), oldest first. Raises ValueError, TypeError, LookupError
    or AttributeError if a coordinator of another version sent data in another form."""
    events = [event for event in events if is_representable_time(event[0])]
    trace = ChromeTrace()
    control = _Control(trace)
    generations = control.generations(events, now)
    control.incidents(incidents)
    control.rest(events)
    slots = _Slots(trace, timeline)
    for incident in incidents:
        _arrows(trace, incident, control, generations, slots)
    return trace


class _Control:
    """The tracks of the control plane."""

    def __init__(self, trace: ChromeTrace) -> None:
        self._trace = trace
        names = {
            _GENERATIONS: "generations",
            _INCIDENTS: "incidents",
            _CHECKPOINTS: "checkpoints",
            _DECISIONS: "elections and events",
        }
        self.tracks = {
            tid: trace.track(_CONTROL, tid, process="control plane", name=name)
            for tid, name in names.items()
        }

    def generations(self, events: Sequence[Event], now: float) -> dict[int, float]:
        """Draw each generation until the next is announced; return when each was announced."""
        formed = [(at, f) for at, name, f in events if name == "generation_formed"]
        ends = [*(at for at, _ in formed[1:]), max([now, *(at for at, _ in formed)])]
        self._trace.lay(
            self.tracks[_GENERATIONS],
            [
                Slice(
                    name=f"generation {f['generation']}: {f['reason']}",
                    category="generation",
                    began=at,
                    ended=end,
                    args={k: f.get(k) for k in ("world_size", "members", "after_step")},
                )
                for (at, f), end in zip(formed, ends, strict=False)
            ],
        )
        return {int(f["generation"]): at for at, f in formed}

    def incidents(self, incidents: Sequence[Mapping[str, Any]]) -> None:
        """Draw each incident from its first sign to the first step after it, by phases."""
        self._trace.lay(self.tracks[_INCIDENTS], [_incident(i) for i in incidents])

    def rest(self, events: Sequence[Event]) -> None:
        """Draw the saves, and the events that have no track of their own."""
        saves = [(at, f) for at, name, f in events if name == "checkpoint_committed"]
        self._trace.lay(
            self.tracks[_CHECKPOINTS],
            [
                Slice(
                    name=f"checkpoint of step {f['step']}",
                    category="checkpoint",
                    began=at - float(f.get("save_s", 0.0)),
                    ended=at,
                    args={k: f.get(k) for k in ("bytes", "stall_s")},
                )
                for at, f in saves
            ],
        )
        for at, name, fields in events:
            if name not in _FOR_TRACKS:
                self._trace.instant(self.tracks[_DECISIONS], name, at, fields)


class _Slots:
    """A track for each slot: the stretches of time that its workers report, and between them what
    the coordinator saw."""

    def __init__(self, trace: ChromeTrace, timeline: pb.JobTimeline) -> None:
        self.of_worker: dict[str, Track] = {}
        self.entered: dict[int, list[tuple[Track, float]]] = {}
        """By generation: the tracks of workers that joined it, and when each began to regroup."""
        own = {(one.node, one.worker): list(one.stretches) for one in timeline.ranks}
        slots: dict[tuple[str, int], list[pb.SlotPeriod]] = {}
        for period in timeline.periods:
            slots.setdefault((period.node, period.slot), []).append(period)
        numbers = {node: n for n, node in enumerate(sorted({node for node, _ in slots}))}
        for (node, slot), periods in sorted(slots.items()):
            pid = _FIRST_NODE + numbers[node]
            track = trace.track(pid, slot + 1, process=f"node {node}", name=f"slot {slot}")
            workers = dict.fromkeys(p.worker for p in periods if p.worker)
            self.of_worker.update(dict.fromkeys(workers, track))
            stretches = [s for w in workers for s in own.get((node, w), [])]
            slices = [_stretch(s) for s in stretches if _is_sound(s.began_unix_s, s.lasted_s)]
            trace.lay(track, [*slices, *_between(periods, slices)])
            for stretch in stretches:
                if stretch.what == _WHAT.WHAT_REGROUP:
                    entered = (track, stretch.began_unix_s)
                    self.entered.setdefault(stretch.generation, []).append(entered)


def _incident(incident: Mapping[str, Any]) -> Slice:
    began, parts = float(incident["unix_s"]), []
    at, recovery = began, incident["recovery"] or {}
    for phase in PHASES:
        lasted_s = float(recovery.get(f"{phase}_s", 0.0))
        parts.append(Slice(name=phase, category="recovery", began=at, ended=at + lasted_s))
        at += lasted_s
    ended = began + float(incident["lasted_s"] or 0.0)
    return Slice(
        name=f"incident {incident['number']}: {incident['cause']}",
        category="incident",
        began=began,
        ended=max(ended, began + 1e-3),  # a failed save has no duration, and must show
        args={k: incident[k] for k in ("summary", "noticed_by", "outcome", "committed", "lost_s")},
        parts=parts,
    )


def _stretch(stretch: pb.Stretch) -> Slice:
    began, lasted_s = stretch.began_unix_s, stretch.lasted_s
    args: dict[str, Any] = {"generation": stretch.generation}
    if stretch.what == _WHAT.WHAT_STEP:
        name, category = f"step {max(0, stretch.step - 1)}", "step"
        # Only the sums of these are measured. They are shown in the order in which they usually
        # follow a commit.
        parts = _in_turn(
            began,
            ("saves", stretch.saves_s),
            ("session.run", stretch.calls_s),
            ("data wait", stretch.data_s),
        )
    elif stretch.what == _WHAT.WHAT_GIVEN_UP:
        name, category, parts = f"given up at step {stretch.step}", "given_up", []
    elif stretch.what == _WHAT.WHAT_REGROUP:
        name, category = f"into generation {stretch.generation}", "recovery"
        rest_s = max(0.0, lasted_s - stretch.join_s - stretch.sync_s)
        parts = _in_turn(
            began, ("decision", rest_s), ("join", stretch.join_s), ("sync", stretch.sync_s)
        )
    else:
        name, category, parts = "unknown here", "unknown", []
    return Slice(
        name=name, category=category, began=began, ended=began + lasted_s, args=args, parts=parts
    )


def _in_turn(began: float, *parts: tuple[str, float]) -> list[Slice]:
    slices, at = [], began
    for name, lasted_s in parts:
        slices.append(Slice(name=name, category="wait", began=at, ended=at + lasted_s))
        at += lasted_s
    return slices


def _between(periods: Sequence[pb.SlotPeriod], covered: Sequence[Slice]) -> Iterator[Slice]:
    """The parts of `periods` that no slice in `covered` covers."""
    spans = sorted((s.began, s.ended) for s in covered)
    for period in periods:  # each compares all spans, some thousands at most
        if not _is_sound(period.began_unix_s, period.ended_unix_s - period.began_unix_s):
            continue
        at = period.began_unix_s
        for began, ended in spans:
            if ended <= at or began >= period.ended_unix_s:
                continue
            if began - at >= _LEAST_GAP_S:
                yield _period(period, at, began)
            at = max(at, ended)
        if period.ended_unix_s - at >= _LEAST_GAP_S:
            yield _period(period, at, period.ended_unix_s)


def _period(period: pb.SlotPeriod, began: float, ended: float) -> Slice:
    return Slice(
        name=period.kind or "unknown",
        category="slot",
        began=began,
        ended=ended,
        args={"worker": period.worker},
    )


def _is_sound(began: float, lasted_s: float) -> bool:
    return (
        is_representable_time(began) and is_representable_time(began + lasted_s) and lasted_s >= 0.0
    )


def _arrows(
    trace: ChromeTrace,
    incident: Mapping[str, Any],
    control: _Control,
    generations: Mapping[int, float],
    slots: _Slots,
) -> None:
    """Draw arrows from the worker that was struck, by the incident and the decision, to each slot
    that regrouped."""
    at, followed_by = float(incident["unix_s"]), int(incident["followed_by"] or 0)
    struck = [slots.of_worker[w] for w in incident["workers"] if w in slots.of_worker][:1]
    begin = [*((track, at) for track in struck), (control.tracks[_INCIDENTS], at)]
    decided = generations.get(followed_by)
    if decided is not None:
        begin.append((control.tracks[_GENERATIONS], decided))
    name = f"incident {incident['number']}"
    effects = slots.entered.get(followed_by, [])
    for effect, entered_at in effects:
        trace.flow(name, [*begin, (effect, max(entered_at, begin[-1][1]))])
    if not effects:
        trace.flow(name, begin)


_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Track:
    """A line of the picture, which the format calls a thread of a process."""

    pid: int
    tid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A stretch of time on a track, in Unix seconds."""

    name: str
    category: str
    began: float
    ended: float
    args: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Slice] = ()
    """The slices that it consists of, one after the other."""


class ChromeTrace:
    """A document in Chrome's Trace Event Format, which Perfetto and chrome://tracing show.

    Slices of a track must not overlap: `lay` takes care of it.

    Source: "Trace Event Format" of the catapult project,
    docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    Methods take instants in Unix seconds; the document has microseconds since the trace begins.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._named: set[tuple[str, int, int]] = set()
        self._laid: dict[Track, list[tuple[float, float]]] = {}
        self._began: float | None = None
        self._flows = 0

    def track(self, pid: int, tid: int, *, process: str, name: str) -> Track:
        """Name a track and its process. Their numbers give the order in which they are shown."""
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
        """Add slices one after the other. A slice that reaches into the next one, as when clocks
        differ, ends where that begins. Call this once for a track."""
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
        self._add(track, "i", name, "event", at, {"s": "t", "args": dict(args)})

    def flow(self, name: str, stations: Sequence[tuple[Track, float]]) -> None:
        """Draw an arrow from cause to effect through the slices that the stations' tracks have at
        those times, or last had before. A station is skipped if its track has no such slice, or if
        its slice is earlier than the station before."""
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
        """The trace as JSON values. `other` is added to its "otherData"."""
        begin = self._began or 0.0
        events = [dict(event) for event in self._events]
        for event in events:
            if "ts" in event:
                ended, event["ts"] = event.get("dur"), round((event["ts"] - begin) * 1e6, 3)
                if ended is not None:  # so that slices that end together still do when rounded
                    event["dur"] = round((ended - begin) * 1e6, 3) - event["ts"]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"begin_unix_s": begin, **other},
        }

    def _slice(self, track: Track, this: Slice, began: float, ended: float) -> None:
        more = {"dur": ended, "args": dict(this.args)}
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
        """`at` if a slice covers it, else the middle of the slice before; None if there is none."""
        laid = self._laid.get(track, [])
        number = bisect.bisect_right(laid, (at, math.inf)) - 1
        if number < 0:
            return None
        began, ended = laid[number]
        return min(at, (began + ended) / 2 if at > ended else ended - _LEAST_S / 2)
