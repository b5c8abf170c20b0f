"""Records of committed steps that are kept until the coordinator has stored them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Record(Protocol):
    """Of one step, as a generation of a run committed it."""

    @property
    def step(self) -> int:
        """From 0."""
        ...

    @property
    def run(self) -> str:
        """The incarnation of the job."""
        ...

    @property
    def generation(self) -> int:
        """Of that run."""
        ...


RecordT = TypeVar("RecordT", bound=Record)


class Backlog(Generic[RecordT]):
    """Records not known to be stored. Every member keeps them: any may have to report them.

    most: the oldest of more are dropped; None: none is.
    """

    def __init__(self, records: Iterable[RecordT] = (), *, most: int | None = None) -> None:
        self._records = list(records)
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
