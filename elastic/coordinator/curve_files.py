"""What the script has reported of each committed step, each step once: as text and for TensorBoard.

    {"step": s, "generation": g, "unix_s": t, "values": {"loss": 0.5}}    a line of JSON
    step,generation,unix_s,name,value                                     a file that ends with .csv

Where a job goes back, since it restores a checkpoint, lines of the steps that it computes again are
taken out; TensorBoard is told to pass them over. A value that is no finite number is null in JSON.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from elastic.errors import ConfigurationError, may_pass
from elastic.v1 import job_pb2 as pb
from elastic.v1.local_pb2 import LedgerStored

_COLUMNS = ("step", "generation", "unix_s", "name", "value")
_LONGEST_LINE = 1 << 20
_EARLIER_RUN = 0  # as a generation of this run, which counts from 1


class _Sink(Protocol):
    """One place that the curve is written to."""

    def open(self) -> None:
        """Begin to write. Raises ConfigurationError or OSError."""
        ...

    def go_back(self, step: int) -> None:
        """What was written of this step and later ones does not count. Raises OSError."""
        ...

    def write(self, points: Sequence[pb.CurvePoint]) -> None:
        """Add them, all or none. Raises OSError."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class CurveFiles:
    """Appends to the files that are wanted; members report steps again when they cannot know that
    they arrived, and each file knows how far it is."""

    def __init__(self, text: Path | None, tensorboard: Path | None, *, incarnation: str) -> None:
        """Raises ConfigurationError if what writes for TensorBoard is not installed."""
        self._curves: list[_Curve] = []
        if text is not None:
            self._curves.append(_Curve(_TextFile(text), incarnation))
        if tensorboard is not None:
            self._curves.append(_Curve(_EventFile(tensorboard), incarnation))
        found = text or tensorboard
        assert found is not None, "there is nothing to write to"
        self.path: Path = found

    def open(self) -> None:
        """Begin to write. Raises ConfigurationError, and OSError for what may pass."""
        for curve in self._curves:
            curve.sink.open()

    def append(self, points: Sequence[pb.CurvePoint]) -> LedgerStored:
        """Add what is new to each; return what all have. Raises OSError."""
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
        """No more will come."""
        for curve in self._curves:
            curve.sink.close()


class _Curve:
    """How far one file is."""

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
            self.sink.write(points)
            self._generation, self._next_step = generation, next_step


class _TextFile:
    """JSON lines, or CSV by its suffix."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_csv = path.suffix == ".csv"
        self._file: io.FileIO | None = None

    def open(self) -> None:
        try:
            if self._path.exists() and not self._path.is_file():
                raise ConfigurationError(
                    f"cannot write the curve {self._path}: it is no regular file, from which lines "
                    "can be taken back; choose another with --curve"
                )
            self._opened()
            with self._path.open("rb") as lines:
                first = lines.readline(_LONGEST_LINE)
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
                f"{self._path} is no curve: it begins with {first[:40]!r}; choose another file "
                "with --curve"
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
            self._set_aside()  # it is another job's: nothing of it goes on here
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
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _opened(self) -> io.FileIO:
        if self._file is None:
            self._file = io.FileIO(self._path, "a")
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
        except (ValueError, TypeError, KeyError):
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
    """TensorBoard's, one more in the directory each time that it is opened."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ConfigurationError(
                "--tensorboard needs tensorboardX, which is not installed "
                f"({error}): pip install 'elastic[tensorboard]'"
            ) from error
        self._directory = directory
        self._writers, self._events = event_file_writer, event_pb2
        self._writer: Any = None

    def open(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
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
            self.close()
            raise

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = self._writers.EventsWriter(str(self._directory / "events"))
        return self._writer
