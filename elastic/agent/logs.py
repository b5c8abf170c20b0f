"""Reads what workers print: follows it for the console, and finds the last lines.

It reads the outputs in memory and not the logs (runtime/log_writer.py), so it waits for no disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic.runtime.file_names import MAX_LENGTH, shortened_name
from elastic.runtime.log_writer import KEPT_BYTES, open_output
from elastic.v1 import local_pb2 as pb

_INTERVAL_S = 0.1
_QUIET_INTERVAL_S = 0.5  # after a while without lines: each read takes time from the workers
_MOST_BYTES = 1 << 18  # at one read
_MOST_AT_ONCE = 2000  # lines of one read: more would hold up the agent's event loop
_MOST_BEHIND = KEPT_BYTES
_MOST_LEFT = 1 << 20  # bytes that are shown of a worker that has ended
_MOST_LEFT_LINES = 10_000  # of these bytes: a million empty lines would take a second
_LONGEST_LINE = 1 << 14  # bytes; a longer line is handed out in pieces
_PROGRESS_EVERY_S = 1.0
_LAST_LINES, _LAST_BYTES, _LONGEST_LAST = 20, 1 << 16, 2000


@dataclass(slots=True)
class WorkerLog:
    """A worker's log, and the descriptor of its output; -1 as long as there is none."""

    path: Path
    output: int = -1

    def last_lines(self, most: int = _LAST_LINES) -> str:
        """The last lines of the output; empty if there is none."""
        return last_lines(self.output, most) if self.output >= 0 else ""

    def append(self, text: str) -> None:
        """Append to the output; raises OSError."""
        os.write(self.output, text.encode(errors="replace"))


@dataclass(slots=True)
class _Followed:
    log: WorkerLog
    offset: int = 0
    rest: bytes = b""
    progress_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Chunk:
    skipped: int
    """Bytes before it that are not shown; negative if the file was truncated and is read from its
    start again."""
    data: bytes


class LogFollower:
    """Hands out the lines that workers write.

    Output that comes faster than it can be shown stays in the file only, and a line says so. A
    carriage return starts the line again, as on a terminal: a progress bar is shown in its newest
    state, once a second.

    on_line: takes the worker and one line without its end.
    """

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self._followed: dict[str, _Followed] = {}

    def follow(self, worker: str, log: WorkerLog, *, from_end: bool = False) -> None:
        """Begin at the start of the output, or at its end."""
        offset = 0
        with contextlib.suppress(OSError):
            offset = os.fstat(log.output).st_size if from_end else 0
        self._followed[worker] = _Followed(log, offset)

    def forget(self, worker: str) -> None:
        followed = self._followed.pop(worker, None)
        if followed is None:
            return
        self._skip_backlog(worker, followed)
        while self._emit_lines(worker, followed, _read_new(followed, most_behind=_MOST_LEFT)):
            pass
        if followed.rest:
            self._on_line(worker, _shown(followed.rest))

    def _skip_backlog(self, worker: str, followed: _Followed) -> None:
        chunk = _read_new(followed, most_behind=_MOST_LEFT, most_bytes=_MOST_LEFT)
        end = len(chunk.data)
        for _ in range(_MOST_LEFT_LINES + 1):
            end = chunk.data.rfind(b"\n", 0, end)
            if end < 0:
                return
        self._tell_skipped(worker, followed, max(0, chunk.skipped) + end + 1)
        followed.rest = b""
        followed.offset += chunk.skipped + end + 1

    def forget_all(self) -> None:
        for worker in list(self._followed):
            self.forget(worker)

    async def run(self) -> None:
        pause_s = _INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _INTERVAL_S if self.poll() else min(2 * pause_s, _QUIET_INTERVAL_S)

    def poll(self) -> bool:
        """Return False if there was nothing new."""
        news = False
        for worker, followed in list(self._followed.items()):
            news = self._emit_lines(worker, followed, _read_new(followed)) or news
        return news

    def _emit_lines(self, worker: str, followed: _Followed, chunk: _Chunk) -> bool:
        """Return False if there was nothing new."""
        if chunk.skipped:
            followed.rest = b""
        if chunk.skipped > 0:
            self._tell_skipped(worker, followed, chunk.skipped)
        if not chunk.data:
            followed.offset += chunk.skipped
            return False
        *lines, last = chunk.data.split(b"\n", _MOST_AT_ONCE)
        left = len(last) if len(lines) == _MOST_AT_ONCE else 0  # for the next read
        followed.offset += chunk.skipped + len(chunk.data) - left
        rest = b"" if left else last
        if lines:
            lines[0] = followed.rest + lines[0]
        else:
            rest = followed.rest + rest
        for line in lines:
            self._on_line(worker, _shown(self._short(worker, _newest(line))))
        followed.rest = self._short(worker, self._overwritten(worker, followed, rest))
        return True

    def _tell_skipped(self, worker: str, followed: _Followed, count: int) -> None:
        self._on_line(
            worker, f"[{count / 1e6:.1f} MB of output not shown; see {followed.log.path}]"
        )

    def _overwritten(self, worker: str, followed: _Followed, rest: bytes) -> bytes:
        """Return the newest state of an unfinished line; show earlier states now and then."""
        newest = _newest(rest)
        if newest != rest:
            before = _shown(rest[: len(rest) - len(newest)])
            if before and time.monotonic() - followed.progress_at >= _PROGRESS_EVERY_S:
                followed.progress_at = time.monotonic()
                self._on_line(worker, before)
        return newest

    def _short(self, worker: str, line: bytes) -> bytes:
        """Hand out pieces of a line that is too long; return the rest."""
        while len(line) > _LONGEST_LINE:
            self._on_line(worker, _shown(line[:_LONGEST_LINE]))
            line = line[_LONGEST_LINE:]
        return line


def _read_new(
    followed: _Followed, most_behind: int = _MOST_BEHIND, most_bytes: int = _MOST_BYTES
) -> _Chunk:
    """Read on. If more than `most_behind` bytes wait, skip all but the last `_MOST_BYTES`."""
    output, offset = followed.log.output, followed.offset
    try:
        behind = os.fstat(output).st_size - offset
        if behind < 0:  # the script has opened /dev/stdout anew
            return _Chunk(-offset, os.pread(output, most_bytes, 0))
        skipped = max(0, behind - _MOST_BYTES) if behind > most_behind else 0
        data = os.pread(output, most_bytes, offset + skipped) if behind > 0 else b""
        if os.fstat(output).st_size - offset - skipped > KEPT_BYTES:
            data = b""  # some of it may have been freed while it was read
    except OSError:
        return _Chunk(0, b"")
    if skipped:
        begun = data.find(b"\n") + 1  # a cut line is of no use
        return _Chunk(skipped + begun, data[begun:])
    return _Chunk(0, data)


def last_lines(source: Path | int, most: int = _LAST_LINES) -> str:
    """The last lines of a log or of an open output; empty if it cannot be read."""
    try:
        with open(source, "rb", closefd=isinstance(source, Path)) as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            data = file.read(_LAST_BYTES)
    except OSError:
        return ""
    lines = [_shown(line) for line in data.split(b"\n")]
    if lines and not lines[-1]:
        del lines[-1]
    return "\n".join(line[-_LONGEST_LAST:] for line in lines[-most:])


def _newest(line: bytes) -> bytes:
    """The line without the text that a carriage return overwrites; one at the end does not."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _shown(line: bytes) -> str:
    return _newest(line).rstrip(b"\r").decode(errors="replace")


_LONGEST_SUFFIX = ".error.json"  # of the files that are named like a log


class WorkerLogs:
    """The logs of this node's living workers, each with its output once the worker is forked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._living: dict[str, WorkerLog] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._living

    def get(self, worker: str) -> WorkerLog | None:
        """The log of a worker; None for one that has ended."""
        return self._living.get(worker)

    def begin(self, worker: str) -> Path:
        """Return the log path of a worker that is about to be started."""
        name = shortened_name(worker, MAX_LENGTH - len(_LONGEST_SUFFIX))
        self._living[worker] = WorkerLog(self._directory / f"{name}.log")
        return self._living[worker].path

    def forked(self, spawned: pb.Spawned) -> WorkerLog:
        """Open the output of a worker. Nothing can be read of it if it cannot be opened."""
        log = self._living[spawned.worker] = WorkerLog(Path(spawned.log_path))
        with contextlib.suppress(OSError):
            if spawned.output:
                log.output = open_output(spawned.worker, spawned.output)
            else:  # of an earlier version, whose workers write to their logs themselves
                log.output = os.open(log.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        return log

    def end(self, worker: str) -> None:
        log = self._living.pop(worker, None)
        if log is not None and log.output >= 0:
            os.close(log.output)
