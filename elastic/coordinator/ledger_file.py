"""The ledger: one JSON line per committed step, from which anybody can check P3.

A line {"resume": s} says that the steps from s on were lost with every member that held them and
are computed again: a reader drops them and goes on with what follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elastic.errors import ConfigurationError
from elastic.v1 import job_pb2 as pb
from elastic.v1.local_pb2 import LedgerStored


class LedgerFile:
    """Appends to `path`. Members report steps again when they can not know that they arrived."""

    def __init__(self, path: Path, *, incarnation: str) -> None:
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"can not write the ledger {path}: {error.strerror}; choose another with --ledger"
            ) from error
        self._newest_generation = 0
        self._next_step: int | None = None
        if _ends_within_a_line(path):
            self._file.write("\n")  # a coordinator was killed while it wrote
        self._write({"incarnation": incarnation})

    def append(self, entries: Iterable[pb.LedgerEntry]) -> LedgerStored:
        """Add what is new; return what is on storage."""
        for entry in entries:
            self._append(entry)
        self._file.flush()
        return LedgerStored(committed=self._next_step or 0, generation=self._newest_generation)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, entry: pb.LedgerEntry) -> None:
        rewound = self._next_step is None or entry.step < self._next_step
        if entry.generation < self._newest_generation:
            return  # reported before, or of a lineage that was given up
        if rewound and entry.generation == self._newest_generation:
            return  # reported before
        if rewound:
            self._write({"resume": entry.step, "generation": entry.generation})
        self._newest_generation = entry.generation
        self._next_step = entry.step + 1
        self._write(
            {
                "step": entry.step,
                "epoch": entry.epoch,
                "generation": entry.generation,
                "world_size": entry.world_size,
                "start": entry.start,
                "stop": entry.stop,
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def _ends_within_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1) not in (b"", b"\n")
