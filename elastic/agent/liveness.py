"""Which workers are alive but silent: stopped by a signal, or holding the interpreter for ever."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

STOPPED_AFTER_S = 1.5
_STOPPED_STATES = "Tt"
_LOOKS_WITHIN_S = 1.5  # it is looked more often, unless the one who looks was stopped


@dataclass(slots=True)
class _Heard:
    pid: int
    at: float
    compiling: bool


class Liveness:
    """Remembers when each worker was last heard of. Its pulse comes several times a second.

    silence_s: the patience with a process that runs; compiling_s: with one that compiled when it
    was last heard of, since a compiler may hold the interpreter for long. 0: no limit; the former
    0: for neither. One that the kernel says is stopped is given STOPPED_AFTER_S.

    A node can be stopped as a whole: a container that is paused, a job that Slurm suspends. So
    time in which nobody looked is no silence.
    """

    def __init__(self, silence_s: float, compiling_s: float) -> None:
        self._silence_s = silence_s
        self._compiling_s = compiling_s
        self._heard: dict[str, _Heard] = {}
        self._looked_at: float | None = None

    def heard(self, worker: str, pid: int, now: float, *, compiling: bool = False) -> None:
        """A message has come; compiling: the process runs torch.compile."""
        self._heard[worker] = _Heard(pid, now, compiling)

    def forget(self, worker: str) -> None:
        """The worker has ended."""
        self._heard.pop(worker, None)

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Workers to give up, with the seconds of their silence."""
        found = []
        away_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        for worker, heard in self._heard.items():
            if away_s > _LOOKS_WITHIN_S:
                heard.at = min(heard.at + away_s, now)
            age_s = now - heard.at
            if age_s < STOPPED_AFTER_S:
                continue
            too_long = 0.0 < self._silence_s <= age_s
            if heard.compiling and too_long:
                too_long = 0.0 < self._compiling_s <= age_s
            if too_long or _state(heard.pid) in _STOPPED_STATES:
                found.append((worker, age_s))
        return found


def _state(pid: int) -> str:
    """The kernel's one-letter state of a process (proc(5)); "?" if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"
