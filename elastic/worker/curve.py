"""What the script reports of each committed step, where a curve of it is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from elastic.worker.state.backlog import Backlog
from elastic.worker.state.curve_points import CurvePoint, CurvePoints

_MOST_VALUES = 32
_LONGEST_NAME = 100


class Curve:
    """Filled by the script's thread, read by the one that reports.

    Values are copied, since a script may add to a tensor in place; those of a block that is given
    up are forgotten.
    """

    def __init__(self) -> None:
        self.kept = False
        """Whether anybody wants it."""
        self.backlog: CurvePoints = Backlog()
        """The job's: a member that joins gets that of another, and a checkpoint has one."""
        self._of_block: dict[str, Any] = {}
        self._newest: CurvePoint | None = None

    def keep(self, keep: bool) -> None:
        """The coordinator wants it, or does not."""
        self.kept = keep
        if not keep:
            self._newest = None
            self.backlog.replace(())

    def report(self, values: Mapping[str, Any], *, committed: bool) -> None:
        """The script's, of the block under way, or of the one that was committed last."""
        newest = self._newest
        found = newest.values if committed and newest is not None else self._of_block
        for name, value in values.items():
            number, kept_as = _number(value), str(name)[:_LONGEST_NAME]
            if number is not None and (kept_as in found or len(found) < _MOST_VALUES):
                found[kept_as] = number

    def committed(self, step: int, run: str, generation: int) -> None:
        """The block's step counts."""
        values, self._of_block = self._of_block, {}
        point = CurvePoint(step, run, generation, time.time(), values)
        self._newest = point
        self.backlog.append(point)

    def given_up(self) -> None:
        """It does not."""
        self._of_block = {}

    def since(self, step: int, *, most: int, whole: bool) -> list[CurvePoint]:
        """Points of steps from `step` on. The newest only if it is `whole`: the script may report
        more of it, below the block."""
        points = self.backlog.since(step, of_oldest=most)
        if points and not whole and points[-1] is self._newest:
            points.pop()
        return points


def _number(value: Any) -> float | torch.Tensor | None:
    """A number, or a tensor of one that nobody else changes, to be read on another thread; None for
    what is neither."""
    if isinstance(value, torch.Tensor):
        is_one = value.numel() == 1 and not value.is_complex() and not value.is_meta
        return value.detach().clone() if is_one else None
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - what a script's own object raises
        return None
