"""Manages the private directories of runs and nodes, with sockets, locks and the job's address."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastic.core.documents import Unreadable, parse, read, to_json
from elastic.errors import ConfigurationError, TransientError, refusal_of
from elastic.runtime.file_names import MIN_LENGTH, shortened_name

_MOST_SOCKET_PATH = 107  # bytes in sockaddr_un (unix(7)), without the terminating null
_LONGEST_SOCKET = "coordinator.sock"
_JOB_FILE = "job.json"
_AGENT_LOCK = "agent.lock"
_LOCK_PATIENCE_S = 2.0
_LAST_RESORT = "/tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job that runs on this machine, and the address of its coordinator."""

    job: str
    pid: int
    address: str


class RunDirectory:
    """The directory of one run; a lock that the kernel drops with the process shows it is alive."""

    def __init__(self, job: str) -> None:
        self._job, self._name = job, f"{job}-{os.getpid()}"
        self.path = _choose(self._name)
        with _exclusive_in(self.path.parent):
            _sweep(self.path.parent)
            self.path.mkdir(mode=0o700)
            self._lock: IO[str] = _open_here(self.path / _JOB_FILE)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def announce(self, address: str) -> None:
        """Let others find the job's coordinator. Raises TransientError if the disk is full."""
        data = to_json(RunningJob(job=self._job, pid=os.getpid(), address=address))
        try:
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), data)
        except OSError as error:
            raise refusal_of(
                f"cannot write to the run's directory {self.path}: {error.strerror}; free some "
                "space, or set XDG_RUNTIME_DIR to another directory",
                error,
            ) from error

    def is_incomplete(self, *names: str) -> bool:
        """Return whether the directory, one of these files or the lock is gone. May block."""
        return _is_incomplete(self.path, (_JOB_FILE, *names), {_JOB_FILE: self._lock})

    def restore(self) -> None:
        """Make what was removed, elsewhere if necessary; the caller must `announce` it again.
        Raises OSError, and ConfigurationError if there is no place."""
        self.path = _choose(self._name)
        self.path.mkdir(mode=0o700, exist_ok=True)
        _relock(self._lock, self.path / _JOB_FILE)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class NodeDirectory:
    """The directory that an agent leaves to its node's next agent, with sockets, workers and token.

    One agent at a time has it. Processes that outlive an agent inherit `hold`: while any of them
    lives, the directory is not removed.
    """

    def __init__(self, job: str, node: str, parent: Path | None = None) -> None:
        """Raises ConfigurationError if it is taken or unusable, TransientError if that may pass."""
        self._name, self._parent = f"{job}@{node}", parent  # neither name contains @
        self.path = self._choose()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _exclusive_in(self.path.parent):
                self._open(job, node)
        except OSError as error:
            raise refusal_of(
                f"cannot use the agent's directory {self.path}: {error.strerror}; choose another "
                "parent with --state-dir",
                error,
            ) from error

    def _open(self, job: str, node: str) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.lstat()
        if not _is_private(found):
            raise ConfigurationError(
                f"the agent's directory {self.path} is not private to this user (owner "
                f"{found.st_uid}, mode {stat.filemode(found.st_mode)}): other users could take "
                "over its workers; remove it, or choose another parent with --state-dir"
            )
        self._lock: IO[str] = _open_here(self.path / _AGENT_LOCK)
        self.hold: IO[str] = _open_here(self.path / _JOB_FILE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigurationError(
                f"another agent of the node {node!r} of the job {job!r} runs on this machine; stop "
                "it, or give this one another name with --node-name"
            ) from None
        with contextlib.suppress(BlockingIOError):  # held by the workers of an earlier agent
            fcntl.flock(self.hold, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _choose(self) -> Path:
        return _choose(self._name) if self._parent is None else _below(self._parent, self._name)

    def is_incomplete(self, *names: str) -> bool:
        """Return whether the directory, one of these files or its lock is gone. May block."""
        return _is_incomplete(self.path, (_JOB_FILE, *names), {_AGENT_LOCK: self._lock})

    def restore(self) -> None:
        """Make what was removed, elsewhere if necessary. Raises OSError, also if another agent has
        it, and ConfigurationError if there is no place."""
        self.path = self._choose()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _relock(self._lock, self.path / _AGENT_LOCK)
        with contextlib.suppress(BlockingIOError):  # held by workers
            _relock(self.hold, self.path / _JOB_FILE)

    def close(self) -> None:
        """Leave the directory to the next agent, or to be removed by another run."""
        self._lock.close()
        self.hold.close()


def running_jobs(job: str | None) -> list[RunningJob]:
    """Return the jobs of this name, or all, that run on this machine under this user."""
    return [j for base in _bases() for j in _running(base) if job is None or j.job == job]


def find_job(job: str | None) -> RunningJob:
    """Return the job of this name, or the only one, that runs on this machine under this user.

    Raises TransientError if there is none, ConfigurationError with all names if there are several.
    """
    jobs = running_jobs(job)
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        which = f"no job named {job!r}" if job is not None else "no job"
        raise TransientError(f"{which} runs on this machine under this user")
    names = ", ".join(f"{j.job} (pid {j.pid})" for j in jobs)
    raise ConfigurationError(f"several jobs run: {names}; choose one with --job or --address")


def _choose(name: str) -> Path:
    """Return the first place where the sockets' paths are short enough, else the first where they
    are with a shortened name. Raises ConfigurationError if there is none."""
    bases = list(_bases())
    for base in bases:
        if _is_short(base / name):
            return base / name
    for base in bases:
        if (path := _shortened(base, name)) is not None:
            return path
    taken = [str(base) for base in _candidates() if base not in bases and os.path.lexists(base)]
    if taken:
        raise ConfigurationError(
            "the run's sockets need a directory that only this user can write to, but others may "
            f"write to {' and '.join(taken)}, or it is no directory; have it removed, or set "
            "XDG_RUNTIME_DIR or TMPDIR to a directory of your own"
        )
    raise ConfigurationError(
        "found no directory for the run's sockets: set TMPDIR to a short path that you can write to"
    )


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path / _LONGEST_SOCKET)) <= _MOST_SOCKET_PATH


def _shortened(base: Path, name: str) -> Path | None:
    """Return a path in `base` with a shortened name; None if `base` alone is too long."""
    room = _MOST_SOCKET_PATH - len(os.fsencode(base / "x" / _LONGEST_SOCKET)) + 1
    return base / shortened_name(name, room) if room >= MIN_LENGTH else None


def _below(parent: Path, name: str) -> Path:
    whole = parent / name
    path = whole if _is_short(whole) else _shortened(parent, name)
    if path is None:
        raise ConfigurationError(
            f"the agent's directory {whole} is too long a path for its sockets; choose a shorter "
            "parent with --state-dir"
        )
    return path


def _bases() -> Iterator[Path]:
    """Yield the directories of this user for runs, made if they are missing; the best first."""
    for base in _candidates():
        with contextlib.suppress(OSError):
            base.mkdir(mode=0o700, exist_ok=True)
            if _is_private(base.lstat()):
                yield base


def _candidates() -> Iterator[Path]:
    roots = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), _LAST_RESORT)
    for root in dict.fromkeys(roots):
        if root and os.access(root, os.W_OK):
            yield Path(root) / f"elastic-{os.getuid()}"


def _open_here(path: Path) -> IO[str]:
    """Open a file for writing; refuse a symbolic link, which may lead elsewhere."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")


def _is_incomplete(directory: Path, names: Sequence[str], locks: Mapping[str, IO[str]]) -> bool:
    if any(not os.path.lexists(directory / name) for name in names):
        return True
    return not all(_is_at(file, directory / name) for name, file in locks.items())


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


def _relock(file: IO[str], path: Path) -> None:
    """If `file` was removed, make it refer to what is at `path` now, under the same descriptor,
    which other code uses, and lock that. Raises BlockingIOError if another process has locked it.
    """
    if not _is_at(file, path):
        with _open_here(path) as fresh:
            os.dup2(fresh.fileno(), file.fileno(), inheritable=False)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _exclusive_in(base: Path) -> Iterator[None]:
    """Keep other processes from making or removing directories in `base`: a new one is not locked
    at its first instant. If another process hangs in here, go on after `_LOCK_PATIENCE_S`."""
    lock = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ends_at = time.monotonic() + _LOCK_PATIENCE_S
        while time.monotonic() < ends_at:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
        yield
    finally:
        os.close(lock)


def _is_private(found: os.stat_result) -> bool:
    """Return whether it is a directory, not a link, to which only this user can write."""
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o022
    )


def _running(base: Path) -> Iterator[RunningJob]:
    for directory in sorted(base.iterdir()):
        if _is_alive(directory):
            found = _job_in(directory / _JOB_FILE)
            if found is not None:
                yield found


def _job_in(path: Path) -> RunningJob | None:
    """Return the job that the file names; None if the file is empty or not valid."""
    try:
        return read(RunningJob, parse(path.read_bytes()))
    except (OSError, Unreadable):
        return None


def _sweep(base: Path) -> None:
    """Remove the directories of runs that were killed."""
    for directory in base.iterdir():
        if directory.is_dir():
            _remove_if_abandoned(directory)


def remove_if_abandoned(directory: Path) -> None:
    """Remove the directory of a run unless a process still locks it."""
    with contextlib.suppress(OSError), _exclusive_in(directory.parent):
        _remove_if_abandoned(directory)


def _remove_if_abandoned(directory: Path) -> None:
    if not _is_alive(directory):
        shutil.rmtree(directory, ignore_errors=True)


def _is_alive(directory: Path) -> bool:
    """Return whether a process holds a lock, or the job file is missing: it is just being made.

    An agent that finds an earlier agent's workers alive has only `_AGENT_LOCK` once those end.
    """
    job_file = directory / _JOB_FILE
    return not job_file.exists() or _is_locked(job_file) or _is_locked(directory / _AGENT_LOCK)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False
