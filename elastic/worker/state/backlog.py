"""Records of committed steps that are kept until the coordinator has stored them: which samples
each consumed, and what the script has reported of it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from elastic.checkpoint.documents import Json

MOST_POINTS = 20_000
"""Not known to be stored: of steps of 2 ms those of 40 s."""
_MOST_HANDED_ON = 2_000


class LedgerRecord(NamedTuple):  # one is made at every step, in a third of a dataclass's time
    """The samples of one committed step: positions [start, stop) of the epoch's order.

    run: the incarnation of the job that committed it. A checkpoint brings records of an earlier
    one, which counted its generations by itself. Empty in checkpoints of before there were runs.
    """

    step: int
    epoch: int
    generation: int
    world_size: int
    start: int
    stop: int
    run: str = ""


class CurvePoint(NamedTuple):
    """One committed step. `values`, numbers and tensors of one, may grow until the next step is
    committed."""

    step: int
    run: str
    generation: int
    unix_s: float
    values: dict[str, Any]


RecordT = TypeVar("RecordT", LedgerRecord, CurvePoint)


class Backlog(Generic[RecordT]):
    """Records not known to be stored. Every member keeps them: any may have to report them.

    most: the oldest of more are dropped; None: none is.
    """

    def __init__(self, records: Iterable[RecordT] = (), *, most: int | None = None) -> None:
        self._records: list[RecordT] = list(records)
        self._most = most
        self._lock = threading.Lock()

    def append(self, record: RecordT) -> None:
        """A step was committed."""
        with self._lock:
            self._records.append(record)
            if self._most is not None and len(self._records) > self._most:
                del self._records[: self._most // 2]

    def stored(self, committed: int, run: str, generation: int) -> None:
        """Records of steps below `committed` are on storage, as of a generation of `run`.

        A member of a later one may have computed the last of them again, with other samples.
        """
        with self._lock:
            self._records = [
                r
                for r in self._records
                if r.step >= committed or (r.run == run and r.generation > generation)
            ]

    def since(self, step: int, *, of_oldest: int | None = None) -> list[RecordT]:
        """The records of steps from `step` on; if given, only those among the oldest so many."""
        with self._lock:
            return [r for r in self._records[:of_oldest] if r.step >= step]

    def replace(self, records: Iterable[RecordT]) -> None:
        """Take over these, and forget all others."""
        with self._lock:
            self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)


LedgerBacklog: TypeAlias = Backlog[LedgerRecord]
CurvePoints: TypeAlias = Backlog[CurvePoint]


def curve_to_json(points: CurvePoints) -> Json:
    """The newest of them, for a member that joins or a checkpoint."""
    newest = points.since(0)[-_MOST_HANDED_ON:]
    return [
        [p.step, p.run, p.generation, p.unix_s, {n: _json(v) for n, v in [*p.values.items()]}]
        for p in newest
    ]


def _json(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)  # JSON has no word for it


def curve_from_json(document: Json) -> Iterable[CurvePoint]:
    """What `curve_to_json` gave; nothing of what is no such document: it is not worth a state."""
    points: list[CurvePoint] = []
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        for step, run, generation, unix_s, values in cast("list[Any]", document):
            numbers = {str(name): float(value) for name, value in values.items()}
            point = CurvePoint(int(step), str(run), int(generation), float(unix_s), numbers)
            points.append(point)
    return points
