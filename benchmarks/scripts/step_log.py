"""Logs what a worker did and when, from the training script itself, under any launcher.

Each worker has a file named after its pid; each line is one `Mark`. CLOCK_MONOTONIC is one clock
for all processes of a machine, so times of different workers can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

READY, BEGIN, COMMIT = "ready", "begin", "commit"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A worker began or committed step `step` (from 0) as `rank` of a group of `world_size`, or has
    built all that it needs to form a group."""

    at_s: float
    what: str
    step: int
    generation: int
    rank: int
    world_size: int
    pid: int


class StepLog:
    """Appends this process's marks. One write per line: a killed worker leaves no partial line."""

    def __init__(self, directory: Path) -> None:
        path = directory / str(os.getpid())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def mark(self, what: str, step: int, *, generation: int, rank: int, world_size: int) -> None:
        line = f"{time.monotonic():.6f} {what} {step} {generation} {rank} {world_size}\n"
        os.write(self._file, line.encode())


class StepLogReader:
    """Follows the logs of all workers in a directory; reads no line twice."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._marks: list[Mark] = []

    def marks(self) -> list[Mark]:
        """Return all marks written so far, oldest first."""
        new = [mark for path in self._directory.iterdir() for mark in self._read(path)]
        if new:
            self._marks = sorted([*self._marks, *new], key=lambda mark: mark.at_s)
        return self._marks

    def _read(self, path: Path) -> Iterator[Mark]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole_lines = file.read().rpartition(b"\n")[0]
        if whole_lines:
            self._offsets[path] = self._offsets.get(path, 0) + len(whole_lines) + 1
        for line in whole_lines.decode().splitlines():
            at_s, what, step, generation, rank, world_size = line.split()
            yield Mark(
                at_s=float(at_s),
                what=what,
                step=int(step),
                generation=int(generation),
                rank=int(rank),
                world_size=int(world_size),
                pid=int(path.name),
            )


def commits(marks: Iterable[Mark]) -> list[Mark]:
    return [mark for mark in marks if mark.what == COMMIT]
