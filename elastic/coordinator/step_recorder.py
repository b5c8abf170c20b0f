"""Writes a record of each step, the ledger or the script's curve, beside the event loop, and keeps
little of what cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from elastic.coordinator.attendance import AttendingNode
from elastic.errors import ConfigurationError
from elastic.runtime.journal import Journal
from elastic.runtime.off_loop import off_loop
from elastic.v1 import local_pb2

_MOST_WAITING = 50_000  # entries; a member sends 20,000 before it is told that they are stored
_MOST_AT_ONCE = 10_000  # in one write: longer ones keep the interpreter from the loop
_RETRY_S = 1.0
_MOST_RETRY_S = 30.0
_PATIENCE_S = 5.0  # at the begin and at the end, with a file system that does not answer


class StepFile(Protocol):
    """Where records go. Every method may block for as long as the file system does."""

    @property
    def path(self) -> Path:
        """For people."""
        ...

    def open(self) -> None:
        """Begin to write. Raises ConfigurationError, and OSError for what may pass."""
        ...

    def append(self, entries: Sequence[Any], /) -> local_pb2.LedgerStored:
        """Add what is new; return what is on storage. Raises OSError: then all is given again."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class StepRecorder:
    """Writes what members report, in order, one write at a time.

    Members keep what they are not told is stored. So a write that fails costs nothing: it is tried
    again, and what is too much to wait here for that is asked for again.

    name: "ledger" or "curve", after which events and messages are named. broadcast: tells every
    member. may_record: whether the file is ours to write now.
    """

    def __init__(
        self,
        file: StepFile,
        journal: Journal,
        *,
        name: str,
        broadcast: Callable[..., None],
        may_record: Callable[[], bool],
        most_waiting: int = _MOST_WAITING,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._file = file
        self._journal = journal
        self._name = name
        self._broadcast = broadcast
        self._may_record = may_record
        self._most_waiting = most_waiting
        self._first_retry_s = retry_s
        self._waiting: list[Any] = []  # first those that are being written
        self._writing = 0  # how many these are
        self._round = 1  # of asking members for all that is not stored
        self._must_ask = False
        self._busy: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = 0.0  # 0: the last write was good
        self._started = self._closing = False

    async def start(self) -> None:
        """Open the file; raises ConfigurationError. What may pass is tried again."""
        opening = self._busy = asyncio.ensure_future(self._open())
        done, _ = await asyncio.wait([opening], timeout=_PATIENCE_S)
        self._started = True
        if done:
            opening.result()

    def take(self, node: AttendingNode, entries: Sequence[Any], *, whole: bool) -> None:
        """A report of one of the node's members. whole: all that it does not know to be stored.

        What comes before they have heard that they are to send all of it must not be stored: they
        would be told so, and forget the steps before. It comes again with the rest.
        """
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
        """Write what may be written now."""
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
        if not done:  # the file system holds it; the thread is nobody's to end
            finishing.cancel()

    # ---- inside

    async def _finish(self) -> None:
        while True:
            self.record()
            if self._busy is None:
                break
            await asyncio.wait([self._busy])
            if self._retry_s:
                break  # it was tried
        await off_loop(self._file.close)

    async def _open(self) -> None:
        try:
            await off_loop(self._file.open)
        except Exception as error:
            if isinstance(error, ConfigurationError) and not self._started:
                self._busy = None
                raise
            self._failed(error)
        else:
            self._succeeded()

    async def _write(self, batch: Sequence[Any]) -> None:
        try:
            stored = await off_loop(lambda: self._file.append(batch))
        except Exception as error:  # noqa: BLE001 - it is a record: the job goes on without
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
        """Keep only what is being written; the rest comes again, and what follows it."""
        del self._waiting[self._writing :]
        self._round += 1
        self._must_ask = True


def _words(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) else None
    return words or f"{type(error).__name__}: {error}"
