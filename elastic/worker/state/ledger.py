"""Which samples each committed step consumed, kept until the coordinator has stored it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


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


class LedgerBacklog:
    """Records not known to be stored. Every member keeps them: any may have to report them."""

    def __init__(self, records: Iterable[LedgerRecord] = ()) -> None:
        self._records = list(records)
        self._lock = threading.Lock()

    def append(self, record: LedgerRecord) -> None:
        """A step was committed."""
        with self._lock:
            self._records.append(record)

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

    def since(self, step: int, *, of_oldest: int | None = None) -> list[LedgerRecord]:
        """The records of steps from `step` on; if given, only those among the oldest so many."""
        with self._lock:
            return [r for r in self._records[:of_oldest] if r.step >= step]

    def __len__(self) -> int:
        return len(self._records)
