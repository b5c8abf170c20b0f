"""Passes each event of a job to all listeners; warnings that modules log become events too."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import ExitCode
from elastic.runtime.output import Output, Stream

_ERRORS = frozenset(
    {
        "certificates_refused",
        "checkpoint_damaged",
        "curve_failed",
        "ledger_failed",
        "not_saved",
        "worker_failed",
    }
)
_WARNINGS = frozenset(
    {
        "admission_awaited",
        "certificate_expires",
        "checkpoint_abandoned",
        "checkpoints_set_aside",
        "connection_refused",
        "coordinator_awaited",
        "coordinator_lost",
        "cut_off",
        "deposed",
        "events_lost",
        "failed_at_end",
        "hang",
        "incident",
        "leadership_in_doubt",
        "leave_timed_out",
        "left_early",
        "loop_paused",
        "loss_not_finite",
        "message_dropped",
        "message_refused",
        "newcomers_refused",
        "node_lost",
        "node_quarantined",
        "node_refused",
        "node_vanished",
        "output_lost",
        "peer_refused",
        "peers_unreachable",
        "preempted",
        "process_stopped",
        "registration_gone",
        "registration_suspect",
        "report_failed",
        "run_directory_lost",
        "run_directory_made_anew",
        "save_retried",
        "security_warning",
        "slow_step",
        "state_differed",
        "step_copies_state",
        "step_was_slow",
        "straggler",
        "store_rolled_back",
        "stray_group_ended",
        "untracked_state",
        "variables_ignored",
        "warning",
        "worker_not_started",
        "zygote_lost",
    }
)
_ENDS_AS_ASKED = (ExitCode.STOPPED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An event. `fields` are JSON values; durations carry their unit in the name.

    Names that a script or a worker has chosen are nested below one field, so that they cannot
    replace another field.
    """

    unix_s: float
    name: str
    fields: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Whose journal it is: "job", "run", "node". An event of another node has its own "node"."""

    @property
    def severity(self) -> str:
        """One of "info", "warning" and "error", which somebody must look at."""
        if self.name in _ERRORS or (self.name == "job_ended" and self._is_failure()):
            return "error"
        is_warning = self.name in _WARNINGS and not self.fields.get("as_wanted")
        return "warning" if is_warning else "info"

    def _is_failure(self) -> bool:
        return self.fields.get("exit_code") not in _ENDS_AS_ASKED

    def to_json(self) -> str:
        """Return one line. Floats that are not finite become null and "non_finite" names them."""
        at = {"time": round(self.unix_s, 6), "event": self.name}
        envelope = {**at, "severity": self.severity}
        lacking: list[str] = []
        fields = {name: _finite(value, name, lacking) for name, value in self.fields.items()}
        if lacking:
            fields["non_finite"] = lacking
        about = {**envelope, **self.origin, **fields, **envelope}
        return json.dumps(about, default=str, allow_nan=False)


def _finite(value: Any, name: str, lacking: list[str]) -> Any:
    """Return the value with null for floats that JSON lacks; append their names to `lacking`."""
    if isinstance(value, float) and not math.isfinite(value):
        lacking.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner, f"{name}.{key}", lacking) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner, f"{name}.{n}", lacking) for n, inner in enumerate(value)]
    return value


Listener = Callable[[Entry], None]

_FREQUENT = frozenset({"progress"})
_MOST_BEHIND = 10_000
_LONGEST_MESSAGE = 1000


class Journal:
    """Passes each entry to the listeners, in their order. One that raises is told no more, since
    who listens must not touch what is told. origin: see `Entry`."""

    def __init__(self, *listeners: Listener, origin: Mapping[str, Any] | None = None) -> None:
        self._listeners = list(listeners)
        self._origin = origin or {}

    def record(self, name: str, /, **fields: Any) -> None:
        entry = Entry(unix_s=time.time(), name=name, fields=fields, origin=self._origin)
        for listener in [*self._listeners]:
            try:
                listener(entry)
            except Exception as error:  # noqa: BLE001 - it only listens
                self._listeners.remove(listener)
                message = f"{listener!r} is told no more events: {type(error).__name__}: {error}"
                self.record("warning", source="journal", message=message[:_LONGEST_MESSAGE])


class RecentEntries:
    """Remembers the newest entries except progress, and hands new ones to followers."""

    def __init__(self, most: int = 1000) -> None:
        self._recent: deque[str] = deque(maxlen=most)
        self._followers: set[asyncio.Queue[str]] = set()

    def __call__(self, entry: Entry) -> None:
        line = entry.to_json()
        if entry.name not in _FREQUENT:
            self._recent.append(line)
        for follower in self._followers:
            # A follower that does not read loses entries, so that memory stays bounded.
            if follower.qsize() < _MOST_BEHIND:
                follower.put_nowait(line)

    async def remembered(self) -> AsyncIterator[str]:
        """Yield the newest entries, oldest first."""
        for line in list(self._recent):
            yield line

    async def follow(self) -> AsyncIterator[str]:
        """Yield the newest entries, oldest first, then each new one as it comes."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        for line in self._recent:
            queue.put_nowait(line)
        self._followers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)


class EntryCounts:
    """Counts entries by name, for metrics."""

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()

    def __call__(self, entry: Entry) -> None:
        self.by_name[entry.name] += 1


class JsonLines:
    """Writes each entry as one JSON line and flushes it."""

    def __init__(self, stream: Stream, *, quiet: frozenset[str] = frozenset()) -> None:
        self._stream = stream
        if isinstance(stream, Output):
            stream.tell_lost = self._tell_lost
        self._quiet = quiet
        self._origin: Mapping[str, Any] = {}

    def __call__(self, entry: Entry) -> None:
        self._origin = entry.origin
        if entry.name not in self._quiet:
            self._stream.write(entry.to_json() + "\n")
            self._stream.flush()

    def _tell_lost(self, count: int) -> str:
        entry = Entry(
            unix_s=time.time(), name="events_lost", fields={"lines": count}, origin=self._origin
        )
        return entry.to_json() + "\n"


_WARNED_EVERY_S = 10.0
_MOST_WARNINGS = 1000


class JournalHandler(logging.Handler):
    """Records logged warnings in the journal, the same one at most every `_WARNED_EVERY_S`.

    Warnings that differ only in their last argument count as the same.
    """

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal
        self._clock = clock
        self._told_at: dict[tuple[object, ...], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        key = (record.name, record.msg, *map(str, arguments[:-1]))
        now = self._clock()
        if now - self._told_at.get(key, -_WARNED_EVERY_S) < _WARNED_EVERY_S:
            return
        if len(self._told_at) >= _MOST_WARNINGS:
            self._told_at.clear()
        self._told_at[key] = now
        source = record.name.removeprefix("elastic.")
        fields = {"message": record.getMessage()}
        if record.exc_info is not None and (error := record.exc_info[1]) is not None:
            fields["message"] += f": {type(error).__name__}: {error}"
            fields["traceback"] = "".join(traceback.format_exception(error))
        self._journal.record("warning", source=source, **fields)


def warnings_to(journal: Journal) -> None:
    """Record this process's warnings, asyncio's too: it would print them between the events."""
    handler = JournalHandler(journal)
    for name in ("elastic", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
