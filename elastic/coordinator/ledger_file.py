"""The ledger: one JSON line per committed step, from which anybody can check P3.

    {"incarnation": id}                        a coordinator of this run begins to write
    {"resume": s, "run": id, "generation": g}  what stands here of steps from s on does not count
    {"step": s, "run": id, "generation": g, ...}

A run is one incarnation of the job, the same under all its leaders, and counts its generations from
1. One that begins from a checkpoint has the records that the earlier run had not known to be stored
when it saved. They keep the earlier run's name and come first, after a resume line that drops what
the earlier run may have written of these steps and beyond. The same line is written where a group
computes steps again that were lost with every member that held them, and where a run begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elastic.errors import ConfigurationError
from elastic.v1 import job_pb2 as pb
from elastic.v1.local_pb2 import LedgerStored

_EARLIER_RUN = 0  # as a generation of this run, which counts from 1


class LedgerFile:
    """Appends to `path`. Members report steps again when they can not know that they arrived.

    incarnation: the run that is under way. All its members have the same records of earlier runs.
    """

    def __init__(self, path: Path, *, incarnation: str) -> None:
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"can not write the ledger {path}: {error.strerror}; choose another with --ledger"
            ) from error
        self._run = incarnation
        self._newest_generation = _EARLIER_RUN
        self._next_step: int | None = None
        if _ends_within_a_line(path):
            self._file.write("\n")  # a coordinator was killed while it wrote
        self._write({"incarnation": incarnation})

    def append(self, entries: Iterable[pb.LedgerEntry]) -> LedgerStored:
        """Add what is new; return what is on storage."""
        for entry in entries:
            self._append(entry)
        self._file.flush()
        return LedgerStored(
            committed=self._next_step or 0, run=self._run, generation=self._newest_generation
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, entry: pb.LedgerEntry) -> None:
        generation = entry.generation if entry.run == self._run else _EARLIER_RUN
        if generation < self._newest_generation:
            return  # reported before, or of a lineage that was given up
        if self._next_step is None or entry.step < self._next_step:
            if self._next_step is not None and generation == self._newest_generation:
                return  # reported before
            self._write({"resume": entry.step, "run": entry.run, "generation": entry.generation})
        self._newest_generation = generation
        self._next_step = entry.step + 1
        self._write(
            {
                "step": entry.step,
                "epoch": entry.epoch,
                "run": entry.run,
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
