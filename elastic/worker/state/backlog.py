"""Keeps records of committed steps until the coordinator has stored them: the samples that each
step consumed, and what the script reported of it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from elastic.checkpoint.documents import Json

MOST_POINTS = 20_000
"""Largest number of curve points that are kept: those of 40 s with steps of 2 ms."""
_MOST_HANDED_ON = 2_000


class LedgerRecord(NamedTuple):  # made at every step, in a third of a dataclass's time
    """The samples of one committed step: positions [start, stop) of the epoch's order.

    loader: the loader's number, in the order in which the script first used them.
    run: the incarnation of the job that committed it. A checkpoint brings records of an earlier
    one, which numbered its own generations. Empty in checkpoints from before runs existed.
    """

    step: int
    epoch: int
    generation: int
    world_size: int
    start: int
    stop: int
    run: str = ""
    loader: int = 0


class CurvePoint(NamedTuple):
    """What the script reported of one committed step. `values` holds numbers and one-element
    tensors; it may grow until the next step is committed."""

    step: int
    run: str
    generation: int
    unix_s: float
    values: dict[str, Any]


RecordT = TypeVar("RecordT", LedgerRecord, CurvePoint)


class Backlog(Generic[RecordT]):
    """Records not known to be stored. Every member keeps them: any may have to report them.

    most: beyond this number the oldest records are dropped; None: no limit.
    """

    def __init__(self, records: Iterable[RecordT] = (), *, most: int | None = None) -> None:
        self._records: list[RecordT] = list(records)
        self._most = most
        self._lock = threading.Lock()

    def append(self, record: RecordT) -> None:
        with self._lock:
            self._records.append(record)
            if self._most is not None and len(self._records) > self._most:
                del self._records[: self._most // 2]

    def stored(self, committed: int, run: str, generation: int) -> None:
        """Drop the records of steps below `committed`: they are stored, as `generation` of `run`
        had them.

        A later generation's stay: it may have computed the last steps again, with other samples.
        """
        with self._lock:
            self._records = [
                r
                for r in self._records
                if r.step >= committed or (r.run == run and r.generation > generation)
            ]

    def since(self, step: int, *, of_oldest: int | None = None) -> list[RecordT]:
        """Return the records from `step` on; `of_oldest`: only those among the oldest so many."""
        with self._lock:
            return [r for r in self._records[:of_oldest] if r.step >= step]

    def replace(self, records: Iterable[RecordT]) -> None:
        with self._lock:
            self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)


LedgerBacklog: TypeAlias = Backlog[LedgerRecord]
CurvePoints: TypeAlias = Backlog[CurvePoint]


def curve_to_json(points: CurvePoints) -> Json:
    """Return the newest points as JSON, for a member that joins or a checkpoint."""
    newest = points.since(0)[-_MOST_HANDED_ON:]
    return [
        [p.step, p.run, p.generation, p.unix_s, {n: _json(v) for n, v in [*p.values.items()]}]
        for p in newest
    ]


def _json(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)  # JSON has no infinity and no NaN


def curve_from_json(document: Json) -> Iterable[CurvePoint]:
    """Return the points of `curve_to_json`, up to a bad one: no state is lost for a curve."""
    points: list[CurvePoint] = []
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        for step, run, generation, unix_s, values in cast("list[Any]", document):
            numbers = {str(name): float(value) for name, value in values.items()}
            point = CurvePoint(int(step), str(run), int(generation), float(unix_s), numbers)
            points.append(point)
    return points
