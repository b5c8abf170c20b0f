"""Makes, enters, empties and deletes named network namespaces, and sweeps those of dead runs.

A run's name identifies the process that made it, so that another run recognises a dead one's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

NAMED = Path("/run/netns")
FILES = Path("/tmp")  # not TMPDIR: the path of a Unix socket must be short
_PREFIX = "el"
_EMPTY_WITHIN_S = 20.0
_COMMAND_TIMEOUT_S = 30.0
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")
_runs = itertools.count()


class Unavailable(Exception):
    """This machine or this user cannot have the network namespaces that are needed here."""


def new_run_name() -> str:
    """A name that is unique on this machine until it boots again."""
    return f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_runs)}"


def ip(namespace: Namespace, *lines: str) -> None:
    """Execute lines of `ip` in a namespace, one after another. Raises Unavailable if one fails."""
    _ip("-n", namespace.name, "-batch", "-", lines=lines)


class Namespace:
    """A network namespace, which exists from `make` to `delete`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def path(self) -> Path:
        return NAMED / self.name

    def make(self) -> None:
        _ip("netns", "add", self.name)

    def delete(self) -> None:
        """Delete its name, which may be gone already; the kernel ends a namespace without users."""
        with contextlib.suppress(Unavailable):
            _ip("netns", "delete", self.name)

    def command(self, *arguments: str | Path) -> list[str]:
        """A command line that executes a command inside, with the pid of the started process."""
        return ["ip", "netns", "exec", self.name, *map(str, arguments)]

    def inside(self, function: Callable[[], T]) -> T:
        """Call a function in this process, but inside: sockets that it opens stay inside."""
        results: list[T] = []
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                _enter(self.path)
                results.append(function())
            except BaseException as error:  # noqa: BLE001 (raised below)
                errors.append(error)

        thread = threading.Thread(target=enter)  # a thread has namespaces of its own
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def open_socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """An IPv4 socket that this process holds, and that sends and receives inside."""
        return self.inside(lambda: socket.socket(socket.AF_INET, kind))

    def processes(self) -> list[int]:
        """Every living process inside, whatever started it."""
        try:
            inside = f"net:[{self.path.stat().st_ino}]"
        except FileNotFoundError:
            return []
        return [int(entry) for entry in os.listdir("/proc") if _namespace_of(entry) == inside]

    def freeze(self, others: Iterable[int] = ()) -> None:
        """Stop all processes inside, and `others`. None escapes by forking."""
        moving = self._stop(set(others))
        assert not moving, f"processes {moving} do not stop"

    def thaw(self) -> None:
        _signal(self.processes(), signal.SIGCONT)

    def kill_all(self, others: Iterable[int] = ()) -> None:
        """Kill all processes inside, and `others`, and wait until none is left.

        All are stopped before the first is killed, so none sees another die.
        """
        others = set(others)
        self._stop(others)
        deadline = time.monotonic() + _EMPTY_WITHIN_S
        while left := {*self.processes(), *filter(_is_running, others)}:
            assert time.monotonic() < deadline, f"processes {left} do not end"
            _signal(left, signal.SIGKILL)
            time.sleep(0.005)

    def _stop(self, others: set[int]) -> set[int]:
        """Stop all processes inside, and `others`; returns those that do not stop in time.

        A process in the state D that has got SIGSTOP counts as stopped: it does not return to its
        own code. It may stay in D: after a vfork it waits for a child that stopped before its exec.
        """
        told: set[int] = set()
        deadline = time.monotonic() + _EMPTY_WITHIN_S
        while True:
            processes = {*self.processes(), *others}
            moving = {p for p in processes if not _is_still(p, was_told=p in told)}
            if not moving or time.monotonic() > deadline:
                return moving
            _signal(moving, signal.SIGSTOP)
            told |= moving


def sweep() -> None:
    """Remove what dead runs have left: namespaces, the processes inside, files."""
    for path in [*NAMED.glob(f"{_PREFIX}-*"), *FILES.glob(f"{_PREFIX}-*")]:
        found = re.match(rf"{_PREFIX}-(\d+)-(\d+)-\d+", path.name)
        if found is None or _started(int(found[1])) == found[2]:
            continue
        if path.parent == NAMED:
            namespace = Namespace(path.name)
            namespace.kill_all()
            namespace.delete()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _ip(*arguments: str, lines: Iterable[str] = ()) -> None:
    command = ["ip", *arguments]
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines),
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise Unavailable("no `ip` in PATH: install iproute2") from None
    if done.returncode != 0:
        story = "; ".join([" ".join(command), *lines])
        raise Unavailable(f"`{story}` failed: {done.stderr.strip()}")


def _enter(path: Path) -> None:
    # os.setns exists from Python 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


def _namespace_of(process: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process}/ns/net")
    return ""  # gone, a zombie, or no process


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []


def _started(process: int) -> str:
    """The start in clock ticks after boot, which tells a process from a later one with its pid."""
    fields = _stat(process)
    return fields[19] if fields else ""


def _is_still(process: int, *, was_told: bool) -> bool:
    state = "".join(_stat(process)[:1])
    return state in ("T", "t", "Z", "X", "") or (state == "D" and was_told)


def _is_running(process: int) -> bool:
    return "".join(_stat(process)[:1]) not in ("Z", "X", "")


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
