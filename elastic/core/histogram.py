"""How often something lasted how long: counts between fixed bounds, which can be added up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

STEP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds for steps: from those of tests to those of the largest models."""
PHASE_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds for recoveries and their phases."""
SAVE_BOUNDS_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0)
"""Bounds for saves of checkpoints."""
CALL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for calls to the store."""


class Histogram:
    """A value equal to a bound counts below it, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Counts of values up to each bound and above the one before; last: above all."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add the counts of another one with the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def copy(self) -> Histogram:
        """One that stays as it is."""
        same = Histogram(self.bounds)
        same.add(self.counts, self.total)
        return same
