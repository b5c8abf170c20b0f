"""Writes a record of each committed step: the ledger, and the curve as text and for TensorBoard.

Threads beside the event loop write the files. Little of what cannot be written is kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic.coordinator.connected_agents import ConnectedNode
from elastic.errors import ConfigurationError, ElasticError, TransientError, may_pass
from elastic.runtime.journal import Journal
from elastic.runtime.off_loop import off_loop
from elastic.v1 import job_pb2 as pb
from elastic.v1 import local_pb2
from elastic.v1.local_pb2 import LedgerStored

_MOST_WAITING = 50_000  # entries; a member sends at most 20,000 that it does not know to be stored
_MOST_AT_ONCE = 10_000  # entries in a write: a longer one keeps the GIL from the event loop
_RETRY_S = 1.0
_MOST_RETRY_S = 30.0
_PATIENCE_S = 5.0  # for a file system that does not answer, at the start and at the end


class StepFile(Protocol):
    """A file for records. Every method may block for as long as the file system does."""

    @property
    def path(self) -> Path:
        """The path that people are shown."""
        ...

    def open(self) -> None:
        """Begin to write. Raises ElasticError, and OSError if it may succeed later."""
        ...

    def append(self, entries: Sequence[Any], /) -> local_pb2.LedgerStored:
        """Add what is new; return what is on storage. After an OSError, give all entries again."""
        ...

    def close(self) -> None: ...


class StepRecorder:
    """Writes what members report, in order, one write at a time.

    Members keep records until they learn that these are stored. So a write that fails loses
    nothing: it is tried again, and members are asked again for entries that did not fit here
    meanwhile.

    name: "ledger" or "curve", the first word of events and messages. broadcast: tells every member.
    may_record: whether this coordinator may write the file now. is_required: the job does not begin
    without the file. newest_group: an earlier coordinator formed this group, and those before it
    are over.
    """

    def __init__(
        self,
        file: StepFile,
        journal: Journal,
        *,
        name: str,
        broadcast: Callable[..., None],
        may_record: Callable[[], bool],
        is_required: bool = True,
        newest_group: int = 0,
        most_waiting: int = _MOST_WAITING,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._file = file
        self._journal = journal
        self._name = name
        self._broadcast = broadcast
        self._may_record = may_record
        self._is_required = is_required
        self._newest_group = newest_group
        self._most_waiting = most_waiting
        self._first_retry_s = retry_s
        self._waiting: list[Any] = []  # the entries that are being written come first
        self._writing = 0  # how many are being written
        self._round = 1  # counts the requests to send all that is not stored
        self._must_ask = False
        self._busy: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = 0.0  # 0: the last write succeeded
        self._started = self._closing = False

    async def start(self) -> None:
        """Open the file. What may pass is tried again, as is any error if the file is not required:
        a job that is under way goes on. Otherwise raises ElasticError."""
        opening = self._busy = asyncio.ensure_future(self._open())
        done, _ = await asyncio.wait([opening], timeout=_PATIENCE_S)
        self._started = True
        if done:
            opening.result()

    def take(
        self, node: ConnectedNode, entries: Sequence[Any], *, whole: bool, group: int = 0
    ) -> None:
        """Take a report of one of the node's members. whole: it has all that the member does not
        know to be stored. group: the member's generation; 0: not known.

        Only the newest group tells the history, of its own steps and those before: each begins with
        a whole report. A member that wakes up in an earlier group may tell of a lineage that was
        given up, so it is not listened to.

        Once members are asked to send everything, a node's reports are ignored until a whole one
        comes: if they were stored, the members would learn so and forget the steps before. They
        come again with the rest.
        """
        if group:
            if group < self._newest_group:
                return
            self._newest_group = group
        if whole:
            node.rounds[self._name] = self._round
        if node.rounds.get(self._name) != self._round:
            return
        if len(self._waiting) + len(entries) > self._most_waiting:
            self._drop()
            return
        self._waiting += entries
        self.record()

    def record(self) -> None:
        """Start to write what may be written now."""
        if self._busy is not None or self._retry is not None or not self._may_record():
            return
        if self._must_ask:
            self._must_ask = False
            self._tell(local_pb2.LedgerStored(send_again=True))
        if self._waiting:
            batch = self._waiting[:_MOST_AT_ONCE]
            self._writing = len(batch)
            self._busy = asyncio.ensure_future(self._write(batch))

    async def close(self) -> None:
        """Write what waits, if that is possible and soon done, and close the file."""
        self._closing = True
        self._end_pause()
        finishing = asyncio.ensure_future(self._finish())
        done, _ = await asyncio.wait([finishing], timeout=_PATIENCE_S)
        if not done:  # the file system blocks it, and no thread can be ended
            finishing.cancel()

    # ---- inside

    async def _finish(self) -> None:
        while True:
            self.record()
            if self._busy is None:
                break
            await asyncio.wait([self._busy])
            if self._retry_s:
                break  # the write has failed
        await off_loop(self._file.close)

    async def _open(self) -> None:
        try:
            await off_loop(self._file.open)
        except Exception as error:
            if isinstance(error, ElasticError) and self._is_required and not self._started:
                self._busy = None
                raise
            self._failed(error)
        else:
            self._succeeded()

    async def _write(self, batch: Sequence[Any]) -> None:
        try:
            stored = await off_loop(lambda: self._file.append(batch))
        except Exception as error:  # noqa: BLE001 - the job goes on without its record
            self._failed(error)
            return
        del self._waiting[: len(batch)]
        self._tell(stored)
        self._succeeded()

    def _succeeded(self) -> None:
        self._busy, self._writing = None, 0
        if self._retry_s:
            self._retry_s = 0.0
            self._journal.record(f"{self._name}_continued", path=str(self._file.path))
        self.record()

    def _failed(self, error: Exception) -> None:
        self._busy, self._writing = None, 0
        if not self._retry_s:
            path, reason = str(self._file.path), _words(error)
            self._journal.record(f"{self._name}_failed", path=path, reason=reason)
        self._retry_s = min(2 * self._retry_s or self._first_retry_s, _MOST_RETRY_S)
        if not self._closing:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._retry_s, self._try_again)

    def _tell(self, stored: local_pb2.LedgerStored) -> None:
        self._broadcast(**{f"{self._name}_stored": stored})

    def _try_again(self) -> None:
        self._end_pause()
        self.record()

    def _end_pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _drop(self) -> None:
        """Keep only what is being written; members send the rest again, and what follows it."""
        del self._waiting[self._writing :]
        self._round += 1
        self._must_ask = True


def _shared(file: str, option: str) -> TransientError:
    return TransientError(
        f"{file} is being written by another run, and two would spoil it; choose another file with "
        f"{option}, or wait until that run has ended"
    )


def _words(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) else None
    return words or f"{type(error).__name__}: {error}"


_EARLIER_RUN = 0  # stands for a generation of an earlier run: this run counts from 1
_NO_STORAGE = {errno.EINVAL, errno.EROFS, errno.ENOTSUP}  # fdatasync on a pipe or device


@dataclass(frozen=True, slots=True)
class _Reached:
    """The newest record: its generation in this run, and the step after it."""

    generation: int = _EARLIER_RUN
    next_step: int | None = None


class LedgerFile:
    """One JSON line per committed step, from which anybody can check P3.

    Appends to `path`. Members report steps again when they cannot know that they arrived.

    Every method may block for as long as the file system does.

    incarnation: the run that is under way. All its members have the same records of earlier runs.
    Only its leaders write the file while it is under way. alone: refuse to begin while another run
    writes it; else that is an error that passes.

        {"incarnation": id}                        a coordinator of this run begins to write
        {"resume": s, "run": id, "generation": g}  lines above of steps from s on are void
        {"step": s, "run": id, "generation": g, ...}

    A run is one incarnation of the job, the same under all its leaders, and counts its generations
    from 1. A run that begins from a checkpoint has the records that the earlier run did not know to
    be stored when it saved. They keep the earlier run's name and come first, after a resume line
    that voids what the earlier run may have written of these steps and later ones. A resume line
    also stands before the first step that a leader writes, where a group computes steps again
    because every member that held them was lost, and after a write that failed.
    """

    def __init__(self, path: Path, *, incarnation: str, alone: bool = False) -> None:
        self.path = path
        self._run = incarnation
        self._mark = Mark(incarnation)
        self._alone = alone
        self._reached = _Reached()
        self._failed = False
        self._descriptor: int | None = None

    def open(self) -> None:
        """Begin to write. Raises ElasticError, and OSError if it may succeed later."""
        try:
            self._store([])
        except WrittenByAnother:
            if not self._alone:
                raise
            raise _shared(f"the ledger {self.path}", "--ledger") from None
        except OSError as error:
            if may_pass(error):
                raise
            raise ConfigurationError(
                f"cannot write the ledger {self.path}: {error.strerror}; choose another with "
                "--ledger"
            ) from error

    def append(self, entries: Iterable[pb.LedgerEntry]) -> LedgerStored:
        """Add what is new; return what is on storage.

        After an OSError, give them again, with earlier ones that may not be stored either.
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
        """Close the file. An error does not matter: what counts is synced."""
        self._mark.remove()
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
        """Write all lines or none: other lines would follow one that is torn."""
        if self._descriptor is not None and not _is_at(self.path, self._descriptor):
            self.close()
        begins = self._descriptor is None
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        try:
            if begins:
                self._require_ledger()
                self._mark.set(self.path)
            if begins:
                torn = "\n" if _ends_within_a_line(self.path) else ""  # its writer was killed
                lines = [torn + _line({"incarnation": self._run}), *lines]
            _write(self._descriptor, "".join(lines).encode())
        except ConfigurationError:
            self.close()
            raise
        except OSError:
            self._failed = True
            self.close()  # a descriptor of a file system that was away may stay unusable
            raise

    def _require_ledger(self) -> None:
        """Raise ConfigurationError if the file has another content, OSError if it is not read."""
        if not _is_regular(self.path):
            return  # nothing can be read from a pipe
        with self.path.open("rb") as file:
            first = file.readline(_LONGEST_LINE)
        if first and not _begins_a_ledger(first):
            raise ConfigurationError(
                f"{self.path} is not a ledger: it begins with {first[:40]!r}; choose another file "
                "with --ledger"
            )


_BEGIN = b'{"incarnation": "'


def _begins_a_ledger(line: bytes) -> bool:
    """Whether it is the first line of a ledger, whose earliest lines may have been removed. The
    line may be cut short: its writer was killed."""
    found = line.rstrip(b"\n")
    if line.startswith(_BEGIN) or (len(found) > 1 and _BEGIN.startswith(found)):
        return True
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "run" in record and bool({"step", "resume"} & {*record})


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
            "loader": entry.loader,
        }
    )


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the path leads to the open file. It does not after the file was removed or
    rotated, and after its file system was unmounted: what is written then is lost, or elsewhere."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:  # opening the file will raise it again
        return False


def _write(descriptor: int, data: bytes) -> None:
    """Write the data to storage; if that fails, take back what was written of it."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        _sync(descriptor)
    except OSError:
        written = len(data) - len(rest)
        with contextlib.suppress(OSError):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if written and os.fstat(descriptor).st_size == end:  # else another has written since
                os.ftruncate(descriptor, end - written)
        raise


def _sync(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        if error.errno not in _NO_STORAGE:
            raise


def _is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.stat().st_mode)


def _ends_within_a_line(path: Path) -> bool:
    if not _is_regular(path):
        return False  # nothing can be read from a pipe
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read(1) not in (b"", b"\n")


_COLUMNS = ("step", "generation", "unix_s", "name", "value")
_LONGEST_LINE = 1 << 20


class _Sink(Protocol):
    """One place that the curve is written to."""

    def open(self) -> None:
        """Begin to write. Raises ElasticError or OSError."""
        ...

    def go_back(self, step: int) -> None:
        """Void what was written of this step and later ones. Raises OSError."""
        ...

    def write(self, points: Sequence[pb.CurvePoint]) -> None:
        """Add the points. After an OSError, all of them come again."""
        ...

    def close(self) -> None: ...


class CurveFiles:
    """The curve: what the script has reported of each committed step, each step once.

    Appends to the files that are wanted. Members report steps again when they cannot know that they
    arrived, so each file keeps its own position.

        {"step": s, "generation": g, "unix_s": t, "values": {"loss": 0.5}}  a line of JSON
        step,generation,unix_s,name,value                                   one of CSV

    When a job restores a checkpoint and so goes back, the lines of the steps that it computes again
    are removed; TensorBoard is told to ignore them. A value that is not finite is null in JSON.

    alone: as for a ledger; each run writes TensorBoard files of its own.
    """

    def __init__(
        self,
        text: Path | None,
        tensorboard: Path | None,
        *,
        incarnation: str,
        alone: bool = False,
    ) -> None:
        """Raises ConfigurationError if TensorBoard files are wanted without tensorboardX."""
        self._curves: list[_Curve] = []
        if text is not None:
            file = _TextFile(text, Mark(incarnation), alone=alone)
            self._curves.append(_Curve(file, incarnation))
        if tensorboard is not None:
            self._curves.append(_Curve(_EventFile(tensorboard), incarnation))
        found = text or tensorboard
        assert found is not None, "there is nothing to write to"
        self.path: Path = found

    def open(self) -> None:
        """Begin to write. Raises ElasticError, and OSError if it may succeed later."""
        for curve in self._curves:
            curve.sink.open()

    def append(self, points: Sequence[pb.CurvePoint]) -> LedgerStored:
        """Add what is new to each file; return what all have. Raises OSError."""
        failed: OSError | None = None
        for curve in self._curves:
            try:
                curve.append(points)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        return self._curves[0].stored()

    def close(self) -> None:
        for curve in self._curves:
            curve.sink.close()


class _Curve:
    """The position of one file, which gets only what is new."""

    def __init__(self, sink: _Sink, run: str) -> None:
        self.sink = sink
        self._run = run
        self._generation = _EARLIER_RUN
        self._next_step: int | None = None

    def append(self, points: Iterable[pb.CurvePoint]) -> None:
        fresh: list[pb.CurvePoint] = []
        generation, next_step = self._generation, self._next_step
        for point in points:
            of = point.generation if point.run == self._run else _EARLIER_RUN
            if of < generation:
                continue  # reported before, or of a lineage that was given up
            if next_step is None or point.step < next_step:
                if next_step is not None and of == generation:
                    continue  # reported before
                self._write(fresh, generation, next_step)
                fresh = []
                self.sink.go_back(point.step)
            generation, next_step = of, point.step + 1
            fresh.append(point)
        self._write(fresh, generation, next_step)

    def stored(self) -> LedgerStored:
        return LedgerStored(
            committed=self._next_step or 0, run=self._run, generation=self._generation
        )

    def _write(
        self, points: Sequence[pb.CurvePoint], generation: int, next_step: int | None
    ) -> None:
        if points:
            self.sink.write([point for point in points if point.values])
            self._generation, self._next_step = generation, next_step


class _TextFile:
    """The curve as text: CSV if the file's suffix is .csv, else JSON lines."""

    def __init__(self, path: Path, mark: Mark, *, alone: bool) -> None:
        self._path = path
        self._mark = mark
        self._alone = alone
        self._is_csv = path.suffix == ".csv"
        self._file: io.FileIO | None = None

    def open(self) -> None:
        try:
            if self._path.exists() and not self._path.is_file():
                raise ConfigurationError(
                    f"cannot write the curve {self._path}: it is not a regular file, so lines "
                    "cannot be removed from it; choose another with --curve"
                )
            self._opened()
            with self._path.open("rb") as lines:
                first = lines.readline(_LONGEST_LINE)
        except WrittenByAnother:
            if not self._alone:
                raise
            raise _shared(f"the curve {self._path}", "--curve") from None
        except OSError as error:
            if may_pass(error):
                raise
            raise ConfigurationError(
                f"cannot write the curve {self._path}: {error.strerror}; choose another file with "
                "--curve"
            ) from error
        if first and first != self._head() and self._step_of(first) is None:
            self.close()
            raise ConfigurationError(
                f"{self._path} is not a curve file: it begins with {first[:40]!r}; choose another "
                "file with --curve"
            )

    def go_back(self, step: int) -> None:
        file, keep = self._opened(), 0
        with self._path.open("rb") as lines:
            for line in lines:
                found = self._step_of(line)
                if (found is not None and found >= step) or not line.endswith(b"\n"):
                    break
                keep += len(line)
            rest = os.fstat(lines.fileno()).st_size - keep
        if rest and keep <= len(self._head()):
            self._set_aside()  # no line of it would stay: it is another job's
        elif rest:
            file.truncate(keep)

    def write(self, points: Sequence[pb.CurvePoint]) -> None:
        file = self._opened()
        size = os.fstat(file.fileno()).st_size
        lines = b"".join(map(self._line, points))
        data = memoryview(lines if size else self._head() + lines)
        try:
            while data:
                data = data[os.write(file.fileno(), data) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            self.close()  # a descriptor of a file system that was away may stay unusable
            raise

    def close(self) -> None:
        self._mark.remove()
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _opened(self) -> io.FileIO:
        if self._file is not None and not _is_at(self._path, self._file.fileno()):
            self.close()
        if self._file is None:
            self._file = io.FileIO(self._path, "a")
            try:
                self._mark.set(self._path)
            except OSError:
                self.close()
                raise
        return self._file

    def _set_aside(self) -> None:
        names = (self._path.with_name(f"{self._path.name}.{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self._path.rename(aside)
        self.close()

    def _head(self) -> bytes:
        return f"{','.join(_COLUMNS)}\n".encode() if self._is_csv else b""

    def _step_of(self, line: bytes) -> int | None:
        try:
            if self._is_csv:
                return int(line.partition(b",")[0])
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def _line(self, point: pb.CurvePoint) -> bytes:
        values = sorted(point.values.items())
        at = round(point.unix_s, 3)
        if self._is_csv:
            rows = io.StringIO()
            csv.writer(rows, lineterminator="\n").writerows(
                (point.step, point.generation, at, name, value) for name, value in values
            )
            return rows.getvalue().encode()
        document: dict[str, Any] = {"step": point.step, "generation": point.generation}
        document["unix_s"] = at
        document["values"] = {n: v if math.isfinite(v) else None for n, v in values}
        return json.dumps(document).encode() + b"\n"


class _EventFile:
    """The curve for TensorBoard: one more file in the directory each time it is opened."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ConfigurationError(
                "--tensorboard needs tensorboardX, which is not installed "
                f"({error}): pip install 'elastic-ddp[tensorboard]'"
            ) from error
        self._directory = directory
        self._writers, self._events = event_file_writer, event_pb2
        self._writer: Any = None
        self._failed = False

    def open(self) -> None:
        try:
            self._opened()
        except OSError as error:
            if may_pass(error):
                raise
            raise ConfigurationError(
                f"cannot write for TensorBoard in {self._directory}: {error.strerror}; choose "
                "another directory with --tensorboard"
            ) from error

    def go_back(self, step: int) -> None:
        start = self._events.SessionLog.START
        self._add([self._events.Event(step=step, session_log={"status": start})])

    def write(self, points: Sequence[pb.CurvePoint]) -> None:
        if self._failed and points:
            self.go_back(points[0].step)  # some of them may have been written
        self._add(
            self._events.Event(
                wall_time=point.unix_s,
                step=point.step,
                summary={
                    "value": [
                        {"tag": name, "simple_value": value}
                        for name, value in sorted(point.values.items())
                    ]
                },
            )
            for point in points
        )

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()

    def _add(self, events: Iterable[Any]) -> None:
        try:
            writer = self._opened()
            for event in events:
                writer.write_event(event)
            writer.flush()
        except OSError:
            self._failed = True
            self.close()
            raise
        self._failed = False

    def _opened(self) -> Any:
        if self._writer is not None and not any(self._directory.glob("events.out.*")):
            self.close()  # the files were removed
        if self._writer is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = self._writers.EventsWriter(str(self._directory / "events"))
        return self._writer


# ---- the mark of the run that writes a file

_GET, _SET = 36, 37  # F_OFD_GETLK and F_OFD_SETLK: a Python built with an old libc lacks the names
_FIRST = 1 << 40  # no file has its data there
_PLACES = 1 << 40
_LOCK = "hhqqi0q"  # struct flock: type, whence, start, length, pid


class WrittenByAnother(BlockingIOError):
    """Another run writes the file. This passes when that run ends."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "another run is writing it, and would spoil it")


class Mark:
    """Marks a file as written by one run, until it is removed or this process ends.

    All leaders of a run may mark a file at the same time: one that was deposed, that is frozen or
    whose host is gone does not keep the next one from writing. So the mark is a shared lock on a
    byte that belongs to the run, and nobody may hold one on the bytes of others. Where a file
    system knows no such locks, there is no mark.
    """

    def __init__(self, run: str) -> None:
        digest = hashlib.sha256(run.encode()).digest()
        self._place = int.from_bytes(digest[:8], "big") % _PLACES
        self._descriptor: int | None = None

    def set(self, path: Path) -> None:
        """Raises WrittenByAnother if the file is marked by another run."""
        self.remove()
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.stat().st_mode):  # others are not spoilt, such as /dev/null
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor is None:
            return
        try:
            fcntl.fcntl(self._descriptor, _SET, _lock(fcntl.F_RDLCK, self._place, 1))
            below = self._is_locked(0, self._place)
            is_anothers = below or self._is_locked(self._place + 1, _PLACES)
        except OSError:
            return
        if is_anothers:
            self.remove()
            raise WrittenByAnother

    def remove(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _is_locked(self, first: int, end: int) -> bool:
        """Whether another process, or another mark of this one, holds a place from first to end."""
        if first == end:
            return False  # a length of 0 means all the rest
        assert self._descriptor is not None
        asked = _lock(fcntl.F_WRLCK, first, end - first)
        found = fcntl.fcntl(self._descriptor, _GET, asked)
        kind: int = struct.unpack(_LOCK, found)[0]
        return kind != fcntl.F_UNLCK


def _lock(kind: int, place: int, length: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, _FIRST + place, length, 0)
