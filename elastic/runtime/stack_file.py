"""Has processes write their stacks to a file in memory on a signal, and reads those files.

This works for processes that do not answer otherwise: the signal's handler in C does not need the
interpreter. Each process has its own file, forked ones too, so that no two write to the same file;
the file disappears with the process. A process without the file, such as a program that was
executed, is not signalled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from elastic.core.whereabouts import Frame
from elastic.runtime.orphans import children

# These are not signals that scripts and batch systems use, such as SIGUSR1 and SIGUSR2.
STACK_SIGNAL = signal.SIGRTMIN + 11
"""Makes the main thread write its stack and go on."""
ALL_STACKS_SIGNAL = signal.SIGRTMIN + 12
"""Writes the stacks of all threads, which may run meanwhile. Use it before killing a process."""

_NAME = "elastic-stacks"
_LINK = f"/memfd:{_NAME}"
_MOST_BYTES = 1 << 18
_LOOK_S = 0.01
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_FRAME = re.compile(r'\s*File "(.*)", line (\d+|\?\?\?) in (.*)')
_IDENTIFIER = re.compile(r"0x[0-9a-f]+")
_HEADINGS = ("Stack (most recent", "Thread 0x", "Current thread 0x")


def write_stacks_on_signal() -> None:
    """Install the handlers in this process and its forks; do nothing if no file can be made."""
    try:
        descriptor = _new_file()
    except OSError:  # no descriptor is left, or the system has no such files
        return
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False)
    faulthandler.register(ALL_STACKS_SIGNAL, file=descriptor, all_threads=True)

    def in_child() -> None:
        """Put an own file at the same descriptor, to which the handler writes."""
        try:
            fresh = _new_file()
        except OSError:
            with contextlib.suppress(OSError):
                os.close(descriptor)  # it is the parent's
            return
        if fresh != descriptor:
            os.dup2(fresh, descriptor, inheritable=False)
            os.close(fresh)

    os.register_at_fork(after_in_child=in_child)


def _new_file() -> int:
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:  # opened to append, since a reader truncates it
        flags = os.O_APPEND | os.O_RDWR | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    finally:
        os.close(descriptor)


# ---- for the process that asks: all of this blocks, for milliseconds


def state_of(pid: int) -> str:
    """The kernel's one-letter state of a process (proc(5)); "?" if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


def descendants(pid: int, most: int) -> list[int]:
    """Return up to `most` descendants of `pid`, the nearest first."""
    family = [pid]
    for parent in family:  # grows meanwhile
        with contextlib.suppress(OSError):
            for child in children(parent):
                if len(family) > most:
                    return family[1:]
                family.append(child)
    return family[1:]


def written_stacks(
    pids: Sequence[int], timeout_s: float, number: int = STACK_SIGNAL
) -> dict[int, str]:
    """Signal these processes and return what each writes. Processes that have no file, are stopped
    or do not write within `timeout_s` are missing."""
    waiting = {pid: path for pid in pids if (path := _signalled(pid, number)) is not None}
    written, ends_at = dict[int, str](), time.monotonic() + timeout_s
    sizes = dict.fromkeys(waiting, 0)
    while waiting and time.monotonic() < ends_at:
        time.sleep(_LOOK_S)
        for pid, path in list(waiting.items()):
            try:
                size = path.stat().st_size
            except OSError:
                del waiting[pid]
                continue
            if size and size == sizes[pid]:
                written[pid] = _read(waiting.pop(pid))
            sizes[pid] = size
    return written


def _signalled(pid: int, number: int) -> Path | None:
    """Signal a process and return the file to which it will write; None if it was not signalled.
    The pidfd guards against a reused pid."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            path = _file_of(pid)
            if path is not None and state_of(pid) not in "TtZX?":
                os.truncate(path, 0)
                signal.pidfd_send_signal(process, number)
                return path
        finally:
            os.close(process)
    return None


def _file_of(pid: int) -> Path | None:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(_LINK):
                return link
    return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def stacks_of_threads() -> dict[int, tuple[Frame, ...]]:
    """Return the Python stacks of this process's threads, by identifier, innermost frame first.
    Empty if no descriptor is left.

    They are walked in C, at one moment. To follow `f_back` of a thread that runs on may end the
    process: in CPython 3.11, an agent was lost to a segmentation fault there.
    """
    try:
        descriptor = _new_file()
    except OSError:
        return {}
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        text = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")
    finally:
        os.close(descriptor)
    found = ((_IDENTIFIER.search(heading), frames) for heading, frames in parse_stacks(text))
    return {int(thread[0], 16): frames for thread, frames in found if thread}


def parse_stacks(text: str) -> list[tuple[str, tuple[Frame, ...]]]:
    """Parse faulthandler's text into (heading, frames, innermost first) of each thread. The thread
    that the signal has reached, which is the main one, comes first."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith(_HEADINGS):
            threads.append((line.partition(" (most recent")[0], []))
        elif threads and (found := _FRAME.match(line)):
            number = int(found[2]) if found[2].isdecimal() else 0
            file, function = (_ESCAPED.sub(_unescaped, found[group]) for group in (1, 3))
            threads[-1][1].append(Frame(file, number, function))
    threads.sort(key=lambda thread: thread[0].startswith("Thread "))
    return [(heading, tuple(frames)) for heading, frames in threads]


def _unescaped(found: re.Match[str]) -> str:
    """Return the letter that faulthandler has written as a number."""
    return chr(int(found[1] or found[2] or found[3], 16))
