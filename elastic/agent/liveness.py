"""Which workers are alive but silent: stopped by a signal, or holding the interpreter for ever."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

STOPPED_AFTER_S = 1.5
_STOPPED_STATES = "Tt"


@dataclass(slots=True)
class _Heard:
    pid: int
    at: float


class Liveness:
    """Remembers when each worker was last heard of. Its pulse comes several times a second.

    silence_s: the patience with a process that runs; one that the kernel says is stopped is
    given STOPPED_AFTER_S. 0 turns the former off.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, _Heard] = {}

    def heard(self, worker: str, pid: int, now: float) -> None:
        """A message has come."""
        self._heard[worker] = _Heard(pid, now)

    def forget(self, worker: str) -> None:
        """The worker has ended."""
        self._heard.pop(worker, None)

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Workers to give up, with the seconds of their silence."""
        found = []
        for worker, heard in self._heard.items():
            age_s = now - heard.at
            if age_s < STOPPED_AFTER_S:
                continue
            too_long = 0.0 < self._silence_s <= age_s
            if too_long or _state(heard.pid) in _STOPPED_STATES:
                found.append((worker, age_s))
        return found


def _state(pid: int) -> str:
    """The kernel's one-letter state of a process (proc(5)); "?" if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
