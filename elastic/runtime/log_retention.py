"""Makes a log directory for each run and removes old ones that no process writes to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import NamedTuple

ZYGOTE_LOG = "zygote.log"
"""A file in each log directory. The zygote, which lives as long as any worker, locks it."""
_YOUNG_S = 60.0  # a new run starts its zygote within this time


class Removed(NamedTuple):
    """The removed directories, their size, and a message for each that cannot be removed."""

    directories: list[Path]
    size_bytes: int
    problems: list[str]


def make_directory(root: Path, job: str) -> Path:
    """Return a new log directory for this process's run of a job. Raises OSError.

    Names sort by time. A name may be taken: agents in containers that share `root` may all have
    pid 1 and begin in the same second.
    """
    name = f"{job}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    directory, times = root / name, 1
    while True:
        try:
            directory.mkdir()
        except FileExistsError:
            times += 1
            directory = root / f"{name}.{times}"
        else:
            return directory


def hold(log: int) -> None:
    """Lock an open log until all processes that have or inherit the descriptor close it."""
    with contextlib.suppress(OSError):  # a file system without locks: see _is_held
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)


def prune(present: Path, job: str, *, runs: int | None, size_bytes: int | None) -> Removed:
    """Remove the oldest directories of the job beside `present` until the limits hold.

    It considers no symbolic links and only names of `make_directory`. It blocks on the file system.
    """
    removed: list[Path] = []
    problems: list[str] = []
    kept_bytes = removed_bytes = 0
    for count, directory in enumerate(_newest_first(present, job), start=1):
        own_bytes = _size_of(directory) if size_bytes is not None else 0
        too_many = runs is not None and count > runs
        too_large = size_bytes is not None and kept_bytes + own_bytes > size_bytes
        if directory == present or not (too_many or too_large) or _is_in_use(directory):
            kept_bytes += own_bytes
            continue
        own_bytes = own_bytes or _size_of(directory)
        try:
            shutil.rmtree(directory)
        except OSError as error:
            problems.append(f"cannot remove {error.filename or directory}: {error.strerror}")
        else:
            removed.append(directory)
            removed_bytes += own_bytes
    return Removed(removed, removed_bytes, problems)


def _newest_first(present: Path, job: str) -> list[Path]:
    named = re.compile(rf"{re.escape(job)}-(\d{{8}}-\d{{6}})-\d+(\.\d+)?")
    found: list[tuple[bool, str, Path]] = []
    with contextlib.suppress(OSError), os.scandir(present.parent) as entries:
        for entry in entries:
            match = named.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                path = present.parent / entry.name
                found.append((path == present, match[1], path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _size_of(directory: Path) -> int:
    size_bytes = 0
    for folder, _, files in os.walk(directory):  # follows no symbolic link
        for name in files:
            with contextlib.suppress(OSError):
                size_bytes += os.lstat(os.path.join(folder, name)).st_size
    return size_bytes


def _is_in_use(directory: Path) -> bool:
    """Return whether workers, or an agent without workers yet, use it; True if in doubt."""
    pid, _, _ = directory.name.rpartition("-")[2].partition(".")
    return _is_alive(int(pid)) or _is_held(directory)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _is_held(directory: Path) -> bool:
    try:
        descriptor = os.open(directory / ZYGOTE_LOG, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return _is_young(directory)
    except OSError:
        return True
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return True
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _is_young(directory: Path) -> bool:
    try:
        return time.time() - directory.stat().st_mtime < _YOUNG_S
    except OSError:
        return True
