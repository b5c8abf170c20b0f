"""Processes whose parent has died: adopted by an ancestor that asks for it, or found, and ended."""

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
KEEPER_GONE = signal.SIGTERM
"""Sent by the kernel to a keeper's command when the keeper has ended."""

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """prctl(2); raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def tell_of_parents_end(parent: int, number: int) -> None:
    """The kernel sends this process a signal when `parent` (its pid) ends, also if it already has.

    Kept across exec. What counts as the parent's end is that of the thread which forked.
    """
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def children(pid: int | None = None) -> Iterator[int]:
    """A process's children, by default this one's, born or adopted, zombies among them. Raises
    OSError if it is gone."""
    for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the group that `pid` leads, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def end_marked(variable: str, value: str, *, session: int | None = None) -> list[int]:
    """Kill every process of this user that was started with this variable in its environment, or
    is in the session of this number.

    For what nobody alive is an ancestor of. Return those that have not ended within seconds,
    because the kernel does not let them.
    """
    gives_up_at = time.monotonic() + _END_S
    killed: set[int] = set()
    while found := [
        pid
        for pid in (int(p.name) for p in _processes())
        if _kill_if_ours(pid, f"{variable}={value}".encode(), session)
    ]:
        killed.update(found)
        if time.monotonic() >= gives_up_at:
            break
        time.sleep(0.01)
    for pid in killed:  # those that have become this process's children
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found


class OrphanReaper:
    """Collects children that have ended and that nobody in this process waits for.

    Such come to the first process of a container, and to one that adopts orphans. What has
    started a child waits for it: only one that is found ended twice is taken for an orphan.
    """

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self) -> None:
        """To be called now and then: what it finds for the first time it collects the next time."""
        ended = _ended_children()
        for pid in ended & self._ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _ended_children() -> set[int]:
    """Those that still wait for somebody to look."""
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
    """It has ended, and waits for its parent to look; raises OSError if it is gone."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _kill_if_ours(pid: int, mark: bytes, session: int | None) -> bool:
    """Whether it was. The descriptor makes sure that the one killed is the one looked at."""
    with contextlib.suppress(OSError):  # it has gone, or is not ours
        descriptor = os.pidfd_open(pid)
        try:
            if pid == os.getpid() or not _is_ours(pid, mark, session):
                return False
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
    """Kill and reap every child, and what each leaves behind, until there is none.

    Return those that have not ended within seconds, because the kernel does not let them.
    """
    gives_up_at = time.monotonic() + _END_S
    while found := list(children()):
        for pid in found:
            signal_group(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = 0
        with contextlib.suppress(ChildProcessError):
            ended, _ = os.waitpid(-1, os.WNOHANG)
        if not ended:
            if time.monotonic() >= gives_up_at:
                break
            time.sleep(0.002)
    return found
