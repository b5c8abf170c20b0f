"""Which of the values that a script reports are finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elastic.runtime.journal import Journal

_MOST_NAMES = 100


class ScriptValues:
    """Tells once when a value turns NaN or infinite, and again after it was finite."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._not_finite: set[str] = set()

    @property
    def not_finite(self) -> Sequence[str]:
        """Names of those that are no finite numbers now."""
        return sorted(self._not_finite)

    def heard(self, values: Mapping[str, float], step: int) -> None:
        """Rank 0 has reported these, with so many steps committed."""
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        bad = bad[:_MOST_NAMES]
        for name in bad:
            if name not in self._not_finite:
                shown = str(values[name])
                self._journal.record("loss_not_finite", name=name, value=shown, step=step)
        self._not_finite = set(bad)
