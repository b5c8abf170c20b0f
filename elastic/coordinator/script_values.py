"""Watches the values that a script reports for NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elastic.runtime.journal import Journal

_MOST_NAMES = 100


class ScriptValues:
    """Records an event when a value turns NaN or infinite, and again only after it was finite."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._not_finite: set[str] = set()

    @property
    def not_finite(self) -> Sequence[str]:
        """Names of the values that are NaN or infinite now."""
        return sorted(self._not_finite)

    def heard(self, values: Mapping[str, float], step: int) -> None:
        """Take the values that rank 0 reported. step: how many steps are committed."""
        bad = sorted(name for name, value in values.items() if not math.isfinite(value))
        bad = bad[:_MOST_NAMES]
        for name in bad:
            if name not in self._not_finite:
                shown = str(values[name])
                self._journal.record("loss_not_finite", name=name, value=shown, step=step)
        self._not_finite = set(bad)
