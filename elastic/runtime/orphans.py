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
_MARKED_END_S = 5.0

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


def children() -> Iterator[int]:
    """This process's children, born or adopted, zombies among them."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (task / "children").read_text().split())


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the group that `pid` leads, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def end_marked(variable: str, value: str) -> None:
    """Kill every process of this user that was started with this variable in its environment.

    For what nobody alive is an ancestor of. What does not end within seconds, because the kernel
    does not let it, is left.
    """
    gives_up_at = time.monotonic() + _MARKED_END_S
    while time.monotonic() < gives_up_at:
        found = [_kill_if_marked(int(p.name), variable, value) for p in _processes()]
        if not any(found):
            return
        time.sleep(0.01)


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _kill_if_marked(pid: int, variable: str, value: str) -> bool:
    """Whether it was. The descriptor makes sure that the one killed is the one looked at."""
    with contextlib.suppress(OSError):  # it has gone, or is not ours
        descriptor = os.pidfd_open(pid)
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"{variable}={value}".encode() in environment:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def end_children() -> None:
    """Kill and reap every child, and what each leaves behind, until there is none."""
    while found := list(children()):
        for pid in found:
            signal_group(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
