"""Metrics that every daemon has: of its process, its store, its certificate and its directories."""

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

_FREE_WITHIN_S = 0.2  # a file system that takes longer is answered for as it was before


class Directories:
    """The space that directories have, by what they are for; looked at beside every loop."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths
        self._found: dict[str, tuple[float, float]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """Again; returns soon whatever the file systems do."""
        for kind, path in self._paths.items():
            if kind not in self._looking or self._looking[kind].done():
                self._looking[kind] = asyncio.ensure_future(self._look_at(kind, path))
        if self._looking:
            await asyncio.wait(self._looking.values(), timeout=_FREE_WITHIN_S)

    def collect(self, found: Found) -> None:
        """What was seen last."""
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
    """What of a process is measured."""

    pauses: LoopPauses
    directories: Directories
    store: StoreCalls | None = None
    certificate: NewestCertificate | None = None

    async def look(self) -> None:
        """At what may have to be waited for; returns soon whatever the file systems do."""
        looks = [asyncio.ensure_future(self.directories.look())]
        if self.certificate is not None:
            looks.append(asyncio.ensure_future(_look_at(self.certificate)))
        await asyncio.wait(looks, timeout=2 * _FREE_WITHIN_S)


Document = dict[str, dict[str, Any]]
"""What a page shows: sections by name, of each the parts by name. A part is a JSON value that does
not change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSource:
    """Where a page has what it shows."""

    html: Callable[[], str]
    """The file; may read a disk."""
    take: Callable[[], Callable[[], Document]]
    """What is known now, on the daemon's event loop; the result is called on another thread, by one
    caller at a time, and makes a document of it."""
    ranges: tuple[str, ...] = ()
    """For which there are curves."""
    curve: Callable[[str], Mapping[str, Any]] = lambda _: {}
    """One of them as JSON, on the daemon's event loop."""
    incident: Callable[[int], str] | None = None
    """All that is known of one, by its number, as JSON; on the daemon's event loop. Raises
    ElasticError if there is none."""
    log: Callable[[str], Awaitable[str]] | None = None
    """The last lines of a worker, by its rank or name; on the daemon's event loop. Raises
    ElasticError."""
    act: Callable[[str, str, str], Awaitable[str]] | None = None
    """Does what a method of the coordinator does, to a node of a name, for a reason; what follows.
    On the daemon's event loop. Raises ElasticError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a daemon is asked by those who watch it; both are called on its event loop."""

    job: str
    snapshot: Callable[[], Collect]
    """What it knows now; the result is called on another thread, and reads nothing that changes."""
    why_not_ready: Callable[[], Awaitable[str]]
    """Empty: it is ready."""
    parts: ProcessParts
    page: PageSource | None = None
    """For people; None: this daemon has no page."""


async def _look_at(certificate: NewestCertificate) -> None:
    """Its files may have been replaced."""
    with contextlib.suppress(ConfigurationError):  # the code that needs it reports the error
        await off_loop(certificate.get)


def collect(found: Found, parts: ProcessParts, taken_unix_s: float) -> None:
    """Add the figures of this process to a snapshot that was taken at a time."""
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
