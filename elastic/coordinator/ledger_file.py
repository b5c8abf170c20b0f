"""The ledger: one JSON line per committed step, from which anybody can check P3.

    {"incarnation": id}                        a coordinator of this run begins to write
    {"resume": s, "run": id, "generation": g}  what stands here of steps from s on does not count
    {"step": s, "run": id, "generation": g, ...}

A run is one incarnation of the job, the same under all its leaders, and counts its generations from
1. One that begins from a checkpoint has the records that the earlier run had not known to be stored
when it saved. They keep the earlier run's name and come first, after a resume line that drops what
the earlier run may have written of these steps and beyond. The same line is written where a group
computes steps again that were lost with every member that held them, where a run begins anew, and
after a write that failed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigurationError, may_pass
from elastic.v1 import job_pb2 as pb
from elastic.v1.local_pb2 import LedgerStored

_EARLIER_RUN = 0  # as a generation of this run, which counts from 1
_NO_STORAGE = {errno.EINVAL, errno.EROFS, errno.ENOTSUP}  # of fdatasync on a pipe or a device


@dataclass(frozen=True, slots=True)
class _Reached:
    """The newest record: its generation in this run, and the step after it."""

    generation: int = _EARLIER_RUN
    next_step: int | None = None


class LedgerFile:
    """Appends to `path`. Members report steps again when they cannot know that they arrived.

    Every method may block for as long as the file system does.

    incarnation: the run that is under way. All its members have the same records of earlier runs.
    """

    def __init__(self, path: Path, *, incarnation: str) -> None:
        self.path = path
        self._run = incarnation
        self._reached = _Reached()
        self._failed = False
        self._descriptor: int | None = None

    def open(self) -> None:
        """Begin to write. Raises ConfigurationError, and OSError for what may pass."""
        try:
            self._store([])
        except OSError as error:
            if may_pass(error):
                raise
            raise ConfigurationError(
                f"cannot write the ledger {self.path}: {error.strerror}; choose another with "
                "--ledger"
            ) from error

    def append(self, entries: Iterable[pb.LedgerEntry]) -> LedgerStored:
        """Add what is new; return what is on storage.

        Raises OSError; what was to be added is then to be given again, with what came before it
        if that may not have been stored either.
        """
        lines, reached = self._lines(entries)
        if lines:
            self._store(lines)
            self._reached, self._failed = reached, False
        return LedgerStored(
            committed=self._reached.next_step or 0,
            run=self._run,
            generation=self._reached.generation,
        )

    def close(self) -> None:
        """Close the file. A file that cannot be closed is no matter: what counts is synced."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _lines(self, entries: Iterable[pb.LedgerEntry]) -> tuple[list[str], _Reached]:
        lines: list[str] = []
        reached, resumes = self._reached, self._failed
        for entry in entries:
            generation = entry.generation if entry.run == self._run else _EARLIER_RUN
            if generation < reached.generation:
                continue  # reported before, or of a lineage that was given up
            if reached.next_step is None or entry.step < reached.next_step:
                if reached.next_step is not None and generation == reached.generation:
                    continue  # reported before
                resumes = True
            if resumes:
                lines.append(_resume(entry))
                resumes = False
            reached = _Reached(generation, entry.step + 1)
            lines.append(_step(entry))
        return lines, reached

    def _store(self, lines: list[str]) -> None:
        """All of them, or as if none: half a line would be followed by others."""
        if self._descriptor is not None and _is_removed(self._descriptor):
            self.close()
        begins = self._descriptor is None
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        try:
            if begins:
                torn = "\n" if _ends_within_a_line(self.path) else ""  # its writer was killed
                lines = [torn + _line({"incarnation": self._run}), *lines]
            _write(self._descriptor, "".join(lines).encode())
        except OSError:
            self._failed = True
            self.close()  # a descriptor of a file system that was away may stay unusable
            raise


def _resume(entry: pb.LedgerEntry) -> str:
    return _line({"resume": entry.step, "run": entry.run, "generation": entry.generation})


def _step(entry: pb.LedgerEntry) -> str:
    return _line(
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


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _is_removed(descriptor: int) -> bool:
    """What is written to it now is gone when it is closed."""
    try:
        return os.fstat(descriptor).st_nlink == 0
    except OSError:  # which writing will meet again
        return False


def _write(descriptor: int, data: bytes) -> None:
    """Bring it to storage; if that fails, take back what was written of it."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        _sync(descriptor)
    except OSError:
        written = len(data) - len(rest)
        with contextlib.suppress(OSError):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if written and os.fstat(descriptor).st_size == end:  # else somebody has written since
                os.ftruncate(descriptor, end - written)
        raise


def _sync(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        if error.errno not in _NO_STORAGE:
            raise


def _ends_within_a_line(path: Path) -> bool:
    if not stat.S_ISREG(path.stat().st_mode):
        return False  # nothing can be read from a pipe
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1) not in (b"", b"\n")
