"""Adopts, finds and ends processes whose parent has died."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0
CLEANER_S = 3.0
"""How long a cleaner gets. torch_shm_manager waits 2 s after the end of its last client."""
LOG_WRITER = "log-writer"
"""The title of the process that writes the workers' logs."""
OWNER = "_ELASTIC_WORKER"
"""In the environment of what a worker starts: the worker's pid. 0: the zygote's own."""
NO_OWNER = f"{0:010d}"
KEEPER_GONE = signal.SIGTERM
"""The signal that the kernel sends to a keeper's command when the keeper has ended."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.getenv.restype = ctypes.c_void_p


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def adopt_orphans() -> None:
    """Make descendants whose parent dies children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(parent: int, number: int) -> None:
    """Have the signal `number` sent to this process when its parent ends, or if it has ended.

    `parent` is the parent's pid. The setting is kept across exec. The kernel sends the signal when
    the parent's thread that forked this process ends.
    """
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def children(pid: int | None = None) -> Iterator[int]:
    """Yield a process's children, by default this one's, also adopted ones and zombies. Raises
    OSError if the process is gone."""
    for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def mark_owner() -> None:
    """Mark this process, and what it starts from now on, as its own; see `owner_of`.

    A child that replaces its program takes the variable along. A child that does not shows in
    /proc the block with which the zygote was started, so this also writes the mark there.
    """
    mark = f"{os.getpid():010d}"
    place = _libc.getenv(OWNER.encode())
    if place is not None and len(ctypes.string_at(place)) == len(mark):
        ctypes.memmove(place, mark.encode(), len(mark))
    os.environ[OWNER] = mark


def owner_of(pid: int) -> int:
    """The worker that has started this process, directly or not; 0 if none has. A process without
    its environment belongs to the worker whose process group it is in. Raises OSError."""
    variable = f"{OWNER}=".encode()
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(variable):
            with contextlib.suppress(ValueError):
                return int(entry[len(variable) :])
    return os.getpgid(pid)


def is_cleaner(pid: int) -> bool:
    """Whether it is a helper that finishes its work once the processes that use it are gone: the
    writer of their logs, or what removes shared memory: torch_shm_manager, or the resource tracker
    of multiprocessing or loky."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    named = os.path.basename(words[0]) in (b"torch_shm_manager", b"elastic " + LOG_WRITER.encode())
    return named or any(b"resource_tracker import main" in word for word in words[1:])


def kill_descendants(pid: int) -> None:
    """Kill what a process has started, but no cleaners: they end once the others are gone."""
    try:
        found = list(children(pid))
    except OSError:
        return
    for child in found:
        kill_descendants(child)
        if not is_cleaner(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the group that `pid` leads, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def end_marked(variable: str, value: str, *, session: int | None = None) -> list[int]:
    """Kill this user's processes that were started with this variable, or are in `session`.

    This finds processes that have no living ancestor. Cleaners get `CLEANER_S` seconds to end by
    themselves. Return those that have not ended after `_END_S` seconds, because the kernel does
    not let them.
    """
    began = time.monotonic()
    killed: set[int] = set()
    while found := [
        pid
        for pid in (int(p.name) for p in _processes())
        if _kill_if_ours(
            pid,
            f"{variable}={value}".encode(),
            session,
            spares=time.monotonic() < began + CLEANER_S,
        )
    ]:
        killed.update(found)
        if time.monotonic() >= began + _END_S:
            break
        time.sleep(0.01)
    for pid in killed:  # those that this process has adopted
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found


class OrphanReaper:
    """Reaps ended children that no code in this process waits for.

    The first process of a container gets such children, and so does one that adopts orphans. Code
    that starts a child waits for it, so only a child that is found ended twice counts as an orphan.
    """

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self) -> None:
        """Reap children that were already ended at the last call. Call this now and then."""
        ended = _ended_children()
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _ended_children() -> set[int]:
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    found = set()
    for pid in children():
        with contextlib.suppress(OSError):
            if is_zombie(pid):
                found.add(pid)
    return found


def is_zombie(pid: int) -> bool:
    """Return whether it has ended and is not reaped yet. Raises OSError if it is gone."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _kill_if_ours(pid: int, mark: bytes, session: int | None, *, spares: bool) -> bool:
    """Kill the process, and return True, if it is ours. The pidfd guards against a reused pid.
    spares: let cleaners live."""
    with contextlib.suppress(OSError):  # the process is gone, or another user's
        descriptor = os.pidfd_open(pid)
        try:
            if pid == os.getpid() or not _is_ours(pid, mark, session):
                return False
            if not (spares and is_cleaner(pid)):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return True
        finally:
            os.close(descriptor)
    return False


def _is_ours(pid: int, mark: bytes, session: int | None) -> bool:
    if session is not None and os.getsid(pid) == session:
        return not is_zombie(pid)
    return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def end_children() -> list[int]:
    """Kill and reap all children, and the orphans they leave, until there are none. Cleaners get
    `CLEANER_S` seconds to end by themselves.

    Return those that have not ended after `_END_S` seconds, because the kernel does not let them.
    """
    began = time.monotonic()
    while found := list(children()):
        spares = time.monotonic() < began + CLEANER_S
        for pid in found:
            if not (spares and is_cleaner(pid)):
                kill_descendants(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ended = 0
        with contextlib.suppress(ChildProcessError):
            ended, _ = os.waitpid(-1, os.WNOHANG)
        if not ended:
            if time.monotonic() >= began + _END_S:
                break
            time.sleep(0.002)
    return found
