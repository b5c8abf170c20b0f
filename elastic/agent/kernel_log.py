"""What the kernel's log says of a process that it has killed for want of memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path

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
