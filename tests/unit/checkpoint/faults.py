"""Kills a writer after a chosen number of operations, as SIGKILL or a power cut would."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory


class Killed(BaseException):
    """The process is gone. Like SystemExit, it is not caught by handlers of Exception."""


class Countdown:
    """Allows `operations` more operations, then refuses all others, those of clean-up included."""

    def __init__(self, operations: int) -> None:
        self._left = operations

    def spend(self) -> None:
        if self._left <= 0:
            raise Killed
        self._left -= 1


class DyingOs:
    """Stands in for `os` in checkpoint.directory; dying in `write` leaves half of the piece."""

    _MUTATING = ("open", "fsync", "replace", "link", "unlink", "rmdir", "mkdir")

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(real) if name in self._MUTATING else real

    def write(self, handle: int, piece: memoryview) -> int:
        try:
            self._countdown.spend()
        except Killed:
            os.write(handle, piece[: len(piece) // 2])
            raise
        return os.write(handle, piece)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._countdown.spend()
            return real(*args, **options)

        return call


class FailingReads:
    """Stands in for `os` in checkpoint.directory: files of one name cannot be opened.

    below: only those in directories whose path contains this.
    """

    def __init__(self, name: str, number: int, below: str = "") -> None:
        self._name, self._number, self._below = name, number, below

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == self._name and self._below in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise OSError(self._number, os.strerror(self._number), path)
        return os.open(path, flags, mode, dir_fd=dir_fd)


class DyingDirectory:
    """A directory whose writes and removals stop after a countdown; half a file may remain."""

    def __init__(self, inner: CheckpointDirectory, countdown: Countdown) -> None:
        self._inner = inner
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(
        self, relative: str, data: bytes | Iterable[memoryview], *, replace: bool = True
    ) -> FileDigest:
        content = data if isinstance(data, bytes) else b"".join(data)
        try:
            self._countdown.spend()
        except Killed:
            parent, _, name = relative.rpartition("/")
            self._inner.write(f"{parent}/.{name}.partial", content[: len(content) // 2])
            raise
        digest = self._inner.write(relative, content, replace=replace)
        self._countdown.spend()
        return digest

    def remove_step(self, name: str) -> None:
        self._countdown.spend()
        self._inner.remove_step(name)
        self._countdown.spend()


def every_kill_point(limit: int) -> Iterator[int]:
    """Yields 0, 1, 2... until the caller's work survives; fails after `limit`."""
    yield from range(limit)
    raise AssertionError(f"the work was still being killed after {limit} operations")
