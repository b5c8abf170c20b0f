"""Whether the kernel has just killed a process of this cgroup because its memory was used up, and
what its log says of it.

A process that it kills looks like any other that got SIGKILL. The cgroup counts such kills, its
children's with its own: `memory.events` of cgroup v2, `memory.oom_control` of v1.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path

_RECENT_S = 2.0
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class OutOfMemory:
    """Watches the count; knows nothing where there is none."""

    def __init__(self, own: Path = _OWN, root: Path = _ROOT) -> None:
        self._file = _counter(own, root)
        self._count = self._read()
        self._rose_at: float | None = None

    def look(self, now: float) -> None:
        """Read the count: to be done more often than every `_RECENT_S` seconds, or a kill of
        another process long ago would be taken for a recent one."""
        count = self._read()
        if count > self._count:
            self._rose_at = now
        self._count = count

    def has_killed(self, now: float) -> bool:
        """A process was killed in the last seconds."""
        self.look(now)
        return self._rose_at is not None and now - self._rose_at < _RECENT_S

    def _read(self) -> int:
        if self._file is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            for line in self._file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _counter(own: Path, root: Path) -> Path | None:
    """The file of the process's own cgroup. In a container its path may be that of the host, and
    what is mounted its own cgroup alone."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found = _first(root, path, "memory.events") or _first(
                    root / "unified", path, "memory.events"
                )
            elif "memory" in controllers.split(","):
                found = _first(root / "memory", path, "memory.oom_control")
            else:
                continue
            if found is not None:
                return found
    return None


def _first(mount: Path, path: str, name: str) -> Path | None:
    return next((f for f in (mount / path.lstrip("/") / name, mount / name) if f.exists()), None)


_KMSG = Path("/dev/kmsg")
_KILLED = re.compile(r"Killed process (\d+) ")
_MOST_READ = 5000  # records at once; a record is read in two microseconds
_LONGEST = 8192  # bytes of a record, as the kernel has it
_REMEMBERED = 32


class KernelLog:
    """Reads what the kernel has logged since this was made; knows nothing where it may not."""

    def __init__(self, path: Path = _KMSG) -> None:
        self._file: int | None = None
        self._kills: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)

    def word_on(self, pid: int, *, out_of_memory: bool) -> str:
        """The line about the kill of this process; empty if there is none. out_of_memory: that the
        kernel has just killed one of the cgroup is known. In a container the log may have another
        number for it: then the only kill there is must be its."""
        self._read()
        found = [kill for kill in self._kills if kill[0] == pid]
        if not found and out_of_memory and len(self._kills) == 1:
            found = list(self._kills)
        if not found:
            return ""
        self._kills.remove(found[-1])
        return found[-1][1]

    def close(self) -> None:
        """No more is read."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> None:
        for _ in range(_MOST_READ):
            if self._file is None:
                return
            try:
                record = os.read(self._file, _LONGEST)
            except BrokenPipeError:
                continue  # records were overwritten before they could be read
            except OSError:
                return  # there are no more
            if not record:
                return
            text = record.partition(b";")[2].partition(b"\n")[0].decode(errors="replace")
            if (killed := _KILLED.search(text)) is not None:
                self._kills.append((int(killed[1]), text))
