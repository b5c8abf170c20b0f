"""Follows the workers' log files and hands their lines to the console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_INTERVAL_S = 0.1
_MOST_BYTES = 1 << 20
_MOST_LINES, _LONGEST_LINE = 20, 2000


@dataclass(slots=True)
class _Followed:
    path: Path
    offset: int = 0
    rest: bytes = b""


class LogFollower:
    """Workers write to files themselves, so their output survives their agent.

    on_line: takes the worker and one line without its end.
    """

    def __init__(self, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self._followed: dict[str, _Followed] = {}

    def follow(self, worker: str, path: Path, *, from_end: bool = False) -> None:
        """Begin with the file's first byte, or with what is new."""
        offset = path.stat().st_size if from_end and path.exists() else 0
        self._followed[worker] = _Followed(path, offset)

    def forget(self, worker: str) -> None:
        """Hand out what is left and stop following."""
        followed = self._followed.get(worker)
        if followed is None:
            return
        while self._drain(worker, followed):
            pass
        if followed.rest:
            self._on_line(worker, followed.rest.decode(errors="replace"))
        del self._followed[worker]

    async def run(self) -> None:
        """Look for new lines until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.poll()

    def poll(self) -> None:
        """Look once."""
        for worker, followed in list(self._followed.items()):
            self._drain(worker, followed)

    def _drain(self, worker: str, followed: _Followed) -> bool:
        """Hand out a portion of what is new; False if there was nothing."""
        try:
            if followed.path.stat().st_size <= followed.offset:
                return False
            with followed.path.open("rb") as file:
                file.seek(followed.offset)
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return False
        followed.offset += len(data)
        *lines, followed.rest = (followed.rest + data).split(b"\n")
        for line in lines:
            self._on_line(worker, line.decode(errors="replace"))
        return bool(data)


def last_lines(log: Path) -> str:
    """What a worker that could not report left in its log."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line[:_LONGEST_LINE] for line in lines[-_MOST_LINES:])
