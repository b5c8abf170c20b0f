"""Provides text streams that never hold up the daemon that writes to them.

A terminal may be stopped with Ctrl-S, a pipe may have no reader or one that sleeps, a disk may be
full. A write to one of these blocks or fails, and neither may happen to the daemon's event loop.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeAlias

_MOST_BYTES = 4 << 20
_PATIENCE_S = 1.0
_MOST_CLOSING_S = 10.0
_LOOK_S = 1.0  # between checks whether the file was rotated


@dataclass(slots=True)
class _Piece:
    """A piece of text that waits to be written; `lost` writes just before it were dropped."""

    data: bytes
    lost: int


class Output(io.TextIOBase):
    """A text stream whose writes never block and never raise.

    A thread writes to the descriptor `fd`. A write is lost and counted if more than `most_bytes`
    would wait, or if it fails, for example because the disk is full. The next write begins with a
    line that says how many were lost. When a pipe has no reader left, all later writes are lost.

    path: of the file at `fd`. If that is rotated or removed, the stream goes on in the file that is
    at `path` then, or a new one, under the same descriptor.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, *, most_bytes: int = _MOST_BYTES, path: Path | None = None) -> None:
        self._fd, self._path = fd, path
        self._look_at = 0.0
        self._most_bytes = most_bytes
        self._pieces: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._written = 0  # pieces that are finished, written or lost
        self._lost = 0
        self._total_lost = 0
        self._gone = False
        self._ends = False
        self._torn = False
        self._changed = threading.Condition()
        self.tell_lost: Callable[[int], str] = _tell_lost
        """Returns the line that says how many writes were lost."""
        self._thread = threading.Thread(target=self._run, name="elastic-output", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        with self._changed:
            return self._total_lost

    def write(self, text: str, /) -> int:
        """Queue the text, or lose it as a whole if too much waits."""
        data = text.encode(self.encoding, self.errors)
        with self._changed:
            if self._gone or self._waiting_bytes + len(data) > self._most_bytes:
                self._lost += 1
                self._total_lost += 1
            elif data:
                self._pieces.append(_Piece(data, self._lost))
                self._lost = 0
                self._waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can."""

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        try:
            return os.isatty(self._fd)
        except OSError:
            return False

    def drain(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all is written, for `_MOST_CLOSING_S` or `patience_s` without progress."""
        ends_at = time.monotonic() + _MOST_CLOSING_S
        with self._changed:
            while self._pieces and not self._gone and time.monotonic() < ends_at:
                if not self._changed.wait_for(self._moved_on(), patience_s):
                    return

    def end(self, patience_s: float = _PATIENCE_S) -> None:
        """Write what `drain` can write in time, then end the thread."""
        with self._changed:
            if self._lost and not self._gone:
                self._pieces.append(_Piece(b"", self._lost))
                self._lost = 0
        self.drain(patience_s)
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _moved_on(self) -> Callable[[], bool]:
        before = self._written
        return lambda: self._written != before

    # ---- on its own thread

    def _run(self) -> None:
        # If the terminal has `stty tostop`, a write from the background would stop this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        lost = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ends)
                if self._ends:
                    return
                piece = self._pieces[0]
            lost += piece.lost
            note = self.tell_lost(lost).encode() if lost else b""
            if self._write(note + piece.data):
                lost = 0
            else:
                lost += 1 if piece.data else 0
            with self._changed:
                self._pieces.popleft()
                self._written += 1
                self._waiting_bytes -= len(piece.data)
                if self._gone:
                    self._pieces.clear()
                    self._waiting_bytes = 0
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Write all of it; return False if that fails."""
        if self._path is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            self._follow(self._path)
        if self._torn:  # do not continue a line that was cut off
            data = b"\n" + data
        rest = memoryview(data)
        try:
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:  # a program that shares it made it non-blocking
                    select.select([], [self._fd], [])
        except OSError as error:
            written = len(data) - len(rest)
            if written:
                self._torn = data[written - 1 : written] != b"\n"
            if error.errno in (errno.EPIPE, errno.EBADF):
                self._gone = True
            with self._changed:
                self._total_lost += 1
            return False
        self._torn = False
        return True

    def _follow(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if not _is_at(self._fd, path):
                fresh = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                os.dup2(fresh, self._fd, inheritable=False)
                os.close(fresh)
                self._torn = False


Stream: TypeAlias = TextIO | Output


def _tell_lost(count: int) -> str:
    return f"elastic: {count} writes were lost here: nobody read them or the disk was full\n"


@contextlib.contextmanager
def never_blocking() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` by `Output` streams in this context.

    They become one stream if they lead to the same file, so that their lines keep their order. If
    one was closed when the process began, text written to it is lost: /dev/null takes its
    descriptor, so that no connection gets it.
    """
    _open_missing()
    before = sys.stdout, sys.stderr
    for stream in before:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    out = Output(1)
    err = out if os.path.samestat(os.fstat(1), os.fstat(2)) else Output(2)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        err.end()
        if out is not err:
            out.end()
        sys.stdout, sys.stderr = before


def _open_missing() -> None:
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
