"""What the script has reported of committed steps, until the coordinator has stored it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, cast

from elastic.checkpoint.documents import Json
from elastic.worker.state.backlog import Backlog

MOST_POINTS = 20_000
"""Not known to be stored: of steps of 2 ms those of 40 s."""
_MOST_HANDED_ON = 2_000


class CurvePoint(NamedTuple):
    """One committed step. `values`, numbers and tensors of one, may grow until the next step is
    committed."""

    step: int
    run: str
    generation: int
    unix_s: float
    values: dict[str, Any]


CurvePoints: TypeAlias = Backlog[CurvePoint]


def to_json(points: CurvePoints) -> Json:
    """The newest of them, for a member that joins or a checkpoint."""
    newest = points.since(0)[-_MOST_HANDED_ON:]
    return [
        [p.step, p.run, p.generation, p.unix_s, {n: _json(v) for n, v in [*p.values.items()]}]
        for p in newest
    ]


def _json(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)  # JSON has no word for it


def from_json(document: Json) -> Iterable[CurvePoint]:
    """What `to_json` gave; nothing of what is no such document: it is not worth a state."""
    points: list[CurvePoint] = []
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        for step, run, generation, unix_s, values in cast("list[Any]", document):
            numbers = {str(name): float(value) for name, value in values.items()}
            point = CurvePoint(int(step), str(run), int(generation), float(unix_s), numbers)
            points.append(point)
    return points
