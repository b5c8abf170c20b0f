"""Defines the metrics that every daemon has, and what a daemon offers to pages about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.errors import ConfigurationError
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.runtime.loop_watch import LoopPauses
from elastic.runtime.metrics import Catalog, Collect, Found
from elastic.runtime.off_loop import off_loop
from elastic.store.measured import StoreCalls
from elastic.version import __version__

CATALOG = Catalog("Every daemon")
BUILD_INFO = CATALOG.gauge(
    "elastic_build_info", "1; the labels have the running version.", "version", "python_version"
)
SNAPSHOT_TIME = CATALOG.gauge(
    "elastic_snapshot_timestamp_seconds",
    "When the figures of this answer were taken. If that is long ago, the daemon's event loop "
    "stands still, and nothing else in the answer is reliable.",
)
PAUSES = CATALOG.counter(
    "elastic_loop_pauses_total",
    "Times that something held up the daemon's event loop for 50 ms or more.",
)
PAUSE_SECONDS = CATALOG.counter("elastic_loop_pause_seconds_total", "Total length of these pauses.")
LONGEST_PAUSE = CATALOG.gauge("elastic_loop_longest_pause_seconds", "The longest pause so far.")
CALL_SECONDS = CATALOG.histogram(
    "elastic_store_call_duration_seconds",
    "Time of this process's calls to etcd, by kind, until an answer or a failure.",
    "kind",
)
CALL_ERRORS = CATALOG.counter(
    "elastic_store_errors_total",
    "Calls of this process to etcd that failed: etcd did not answer, or refused. Some are retried.",
    "kind",
)
LAST_ANSWER = CATALOG.gauge(
    "elastic_store_last_answer_timestamp_seconds", "When etcd last answered this process."
)
CERTIFICATE_EXPIRY = CATALOG.gauge(
    "elastic_certificate_expiry_timestamp_seconds",
    "When the certificate of this process expires; absent without TLS.",
)
FREE = CATALOG.gauge(
    "elastic_directory_free_bytes",
    "Free space on a directory's file system, for this user. Absent for a remote directory, and "
    "until a file system that hangs answers.",
    "kind",
)
SIZE = CATALOG.gauge("elastic_directory_size_bytes", "Size of that file system.", "kind")

_FREE_WITHIN_S = 0.2  # if a file system takes longer, its last figures are reported


class Directories:
    """The space of directories' file systems by the directory's purpose, read by threads."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self._found: dict[str, tuple[float, float]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """Read the space again. Returns soon even if a file system hangs."""
        for kind, path in self._paths.items():
            if kind not in self._looking or self._looking[kind].done():
                self._looking[kind] = asyncio.ensure_future(self._look_at(kind, path))
        if self._looking:
            await asyncio.wait(self._looking.values(), timeout=_FREE_WITHIN_S)

    def collect(self, found: Found) -> None:
        for kind, (free, size) in self._found.items():
            found.set(FREE, free, kind=kind)
            found.set(SIZE, size, kind=kind)

    async def _look_at(self, kind: str, path: str) -> None:
        try:
            space = await off_loop(lambda: os.statvfs(path))
        except OSError:
            self._found.pop(kind, None)
            return
        self._found[kind] = (space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessParts:
    """The parts of a process that its metrics describe."""

    pauses: LoopPauses
    directories: Directories
    store: StoreCalls | None = None
    certificate: NewestCertificate | None = None

    async def look(self) -> None:
        """Read what may block. Returns soon even if a file system hangs."""
        looks = [asyncio.ensure_future(self.directories.look())]
        if self.certificate is not None:
            looks.append(asyncio.ensure_future(_look_at(self.certificate)))
        await asyncio.wait(looks, timeout=2 * _FREE_WITHIN_S)


Document = dict[str, dict[str, Any]]
"""What a page shows: sections by name, each with its parts by name. A part is a JSON value that is
never modified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSource:
    """The functions that give a page its content. Most are called on the daemon's event loop."""

    html: Callable[[], str]
    """Returns the HTML file; may read a disk."""
    take: Callable[[], Callable[[], Document]]
    """Takes a snapshot, on the daemon's event loop. The result is called on another thread, by one
    caller at a time, and makes a document of the snapshot."""
    ranges: tuple[str, ...] = ()
    """The names of the time ranges that have a curve."""
    curve: Callable[[str], Mapping[str, Any]] = lambda _: {}
    """Returns the curve of a range as JSON values, on the daemon's event loop."""
    incident: Callable[[int], str] | None = None
    """Returns the record of the incident of a number as JSON text, on the daemon's event loop.
    Raises ElasticError if there is none."""
    log: Callable[[str], Awaitable[str]] | None = None
    """Returns the last lines of a worker, given by rank or name, on the daemon's event loop. Raises
    ElasticError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a daemon offers to monitoring. Both functions are called on its event loop."""

    job: str
    snapshot: Callable[[], Collect]
    """Takes a snapshot. The result is called on another thread and reads only the snapshot."""
    why_not_ready: Callable[[], Awaitable[str]]
    """Returns the reason; empty if the daemon is ready."""
    parts: ProcessParts
    page: PageSource | None = None
    """The content of its page for people; None: the daemon has no page."""


async def _look_at(certificate: NewestCertificate) -> None:
    """Load the certificate again if its files were replaced."""
    with contextlib.suppress(ConfigurationError):  # the code that needs it reports the error
        await off_loop(certificate.get)


def collect(found: Found, parts: ProcessParts, taken_unix_s: float) -> None:
    python = platform.python_version()
    found.set(BUILD_INFO, 1.0, version=__version__, python_version=python)
    found.set(SNAPSHOT_TIME, taken_unix_s)
    pauses = parts.pauses
    found.set(PAUSES, pauses.count)
    found.set(PAUSE_SECONDS, pauses.total_s)
    found.set(LONGEST_PAUSE, pauses.longest_s)
    if parts.store is not None:
        for kind, durations in sorted(parts.store.durations.items()):
            found.buckets(CALL_SECONDS, durations.copy(), kind=kind)
            found.set(CALL_ERRORS, parts.store.errors[kind], kind=kind)
        found.set(LAST_ANSWER, parts.store.answered_unix_s)
    if parts.certificate is not None:
        found.set(CERTIFICATE_EXPIRY, parts.certificate.expires_unix_s)
    parts.directories.collect(found)
