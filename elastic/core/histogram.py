"""A histogram of durations with fixed bounds, so that those of several sources can be added up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

STEP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds for the durations of steps, from those of tests to those of the largest models."""
PHASE_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds for the durations of recoveries and their phases."""
SAVE_BOUNDS_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0)
"""Bounds for the durations of saves of checkpoints."""
CALL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for the durations of calls to the store."""


class Histogram:
    """Counts values by ranges. A value equal to a bound counts as below it, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Values up to each bound and above the one before. The last count: above all bounds."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add the counts of another histogram, which has the same bounds, and its sum of values."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def copy(self) -> Histogram:
        same = Histogram(self.bounds)
        same.add(self.counts, self.total)
        return same
