"""A private directory for one run's sockets, by which others find the job; gone when it is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastic.errors import ConfigurationError, TransientError

_MOST_SOCKET_PATH = 100  # sockaddr_un holds 107 bytes
_JOB_FILE = "job.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job that runs on this machine, as others see it."""

    job: str
    pid: int
    address: str


class RunDirectory:
    """Made for one run; a lock that the kernel drops with the process says that it lives."""

    def __init__(self, job: str) -> None:
        base = _base()
        _sweep(base)
        self.path = base / f"{job}-{os.getpid()}"
        self.path.mkdir(mode=0o700)
        self._job = job
        self._lock: IO[str] = (self.path / _JOB_FILE).open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def announce(self, address: str) -> None:
        """Let others find the job's coordinator."""
        document = {"job": self._job, "pid": os.getpid(), "address": address}
        self._lock.write(json.dumps(document))
        self._lock.flush()

    def remove(self) -> None:
        """The run is over."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def find_job(job: str | None) -> RunningJob:
    """The job of this name, or the only one; raises TransientError naming those that run."""
    jobs = [j for j in _running(_base()) if job is None or j.job == job]
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        which = f"no job named {job!r}" if job is not None else "no job"
        raise TransientError(f"{which} runs on this machine under this user")
    names = ", ".join(f"{j.job} (pid {j.pid})" for j in jobs)
    raise ConfigurationError(f"several jobs run: {names}; choose one with --job or --address")


def _base() -> Path:
    """Where this user's run directories are: a place that no other user can write to."""
    for root in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not root or not os.access(root, os.W_OK):
            continue
        base = Path(root) / f"elastic-{os.getuid()}"
        if len(str(base)) + 60 > _MOST_SOCKET_PATH + 40:
            continue
        base.mkdir(mode=0o700, exist_ok=True)
        if base.stat().st_uid == os.getuid():
            return base
    raise ConfigurationError(
        "no directory for the run's sockets: set TMPDIR to a short path that you can write to"
    )


def _running(base: Path) -> Iterator[RunningJob]:
    for directory in sorted(base.iterdir()):
        if _is_alive(directory):
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield RunningJob(**json.loads((directory / _JOB_FILE).read_text()))


def _sweep(base: Path) -> None:
    """Remove what runs that were killed have left."""
    for directory in base.iterdir():
        if directory.is_dir() and not _is_alive(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_alive(directory: Path) -> bool:
    """Somebody holds the lock. A directory without a job file is just being made."""
    try:
        with (directory / _JOB_FILE).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return not (directory / _JOB_FILE).exists()
    return False
