"""Time series of a job, in rings of fixed size: fine for the last minutes, coarse for the whole
run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MOST_VALUES = 8
"""The maximum number of reported values that have a curve. The first names get one."""
RUN = "run"
"""The name of the range that covers the whole run."""
_MOST_POINTS = 720
_LONGEST_NAME = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The state of a job at one moment."""

    step: int = 0
    """The number of committed steps."""
    step_s: float | None = None
    """Mean duration of the steps since the previous sample. None: there was no step."""
    world_size: int = 0
    wanted: int = 0
    samples_per_s: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    """What the script reports, by name."""


@dataclass(slots=True)
class _Point:
    """The samples of one interval, merged."""

    begin: float
    step: int
    step_s: float | None
    smallest: int
    world_size: int
    wanted: int
    samples_per_s: float
    values: dict[int, float]
    count: int = 1
    timed: int = 0
    """The number of samples that had a `step_s`."""

    def add(self, later: _Point) -> None:
        """Merge a later point of the same interval into this one."""
        self.step, self.wanted, self.world_size = later.step, later.wanted, later.world_size
        self.smallest = min(self.smallest, later.smallest)
        count = self.count + later.count
        self.samples_per_s += (later.samples_per_s - self.samples_per_s) * later.count / count
        self.count = count
        if later.step_s is not None:
            timed = self.timed + later.timed
            mine_s = self.step_s if self.step_s is not None else 0.0
            self.step_s = mine_s + (later.step_s - mine_s) * later.timed / timed
            self.timed = timed
        self.values |= later.values

    def copy(self) -> _Point:
        return replace(self, values=dict(self.values))


class _Ring:
    """Points of equal width, the newest last. A full ring drops its oldest point; a `growing` one
    doubles its width instead, so that it keeps covering the whole time."""

    def __init__(self, width_s: float, most: int, *, growing: bool = False) -> None:
        self.width_s, self._most, self._growing = width_s, most, growing
        self.points: deque[_Point] = deque(maxlen=most + 1)

    def add(self, point: _Point) -> None:
        begin = math.floor(point.begin / self.width_s) * self.width_s
        if self.points and begin <= self.points[-1].begin:
            self.points[-1].add(point)
            return
        point.begin = begin
        self.points.append(point)
        if len(self.points) > self._most:
            if self._growing:
                self._halve()
            else:
                self.points.popleft()

    def _halve(self) -> None:
        before, self.points = self.points, deque(maxlen=self._most + 1)
        self.width_s *= 2
        for point in before:
            self.add(point)


@dataclass(frozen=True, slots=True)
class Curve:
    """The curve of one range, ready for JSON."""

    width_s: float
    names: tuple[str, ...]
    """The names of the values."""
    rows: list[tuple[float | int | None, ...]]
    """One row an interval: its start in seconds, steps committed at its end, mean duration of its
    steps in seconds, smallest and last world size, wanted world size, samples per second, then the
    last of each value. None where nothing is known."""


class Curves:
    """The curves of a job over all ranges, filled by coordinator/history.py.

    All instants are of one clock that does not jump.
    """

    def __init__(self) -> None:
        self._rings = {
            "15m": _Ring(2.0, 450),
            "6h": _Ring(30.0, _MOST_POINTS),
            RUN: _Ring(60.0, _MOST_POINTS, growing=True),
        }
        self._names: list[str] = []

    @property
    def ranges(self) -> tuple[str, ...]:
        """Their names, the shortest range first."""
        return tuple(self._rings)

    def add(self, now: float, sample: Sample) -> None:
        point = _Point(
            begin=now,
            step=sample.step,
            step_s=sample.step_s,
            smallest=sample.world_size,
            world_size=sample.world_size,
            wanted=sample.wanted,
            samples_per_s=sample.samples_per_s,
            values=self._values(sample.values),
            timed=sample.step_s is not None,
        )
        for ring in self._rings.values():
            ring.add(point.copy())

    def curve(self, name: str, ahead_s: float = 0.0) -> Curve:
        """Return the curve of range `name`. ahead_s: seconds to add to every instant, to turn it
        into one of another clock."""
        ring, indices = self._rings[name], range(len(self._names))
        rows: list[tuple[float | int | None, ...]] = [
            (
                round(p.begin + ahead_s, 1),
                p.step,
                round(p.step_s, 6) if p.step_s is not None else None,
                p.smallest,
                p.world_size,
                p.wanted,
                round(p.samples_per_s, 1),
                *(p.values.get(index) for index in indices),
            )
            for p in ring.points
        ]
        return Curve(ring.width_s, tuple(self._names), rows)

    def _values(self, values: Mapping[str, float]) -> dict[int, float]:
        """The finite values, by the index of their names."""
        found: dict[int, float] = {}
        for name, value in values.items():
            if not math.isfinite(value) or len(name) > _LONGEST_NAME:
                continue
            if name not in self._names and len(self._names) < MOST_VALUES:
                self._names.append(name)
            if name in self._names:
                found[self._names.index(name)] = value
        return found
