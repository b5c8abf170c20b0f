"""Where each worker's log is, and which logs of workers that have ended are kept."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from elastic.runtime.file_names import LONGEST, fitting

KEPT = 100
_LONGEST_SUFFIX = ".error.json"  # of what lies beside a log


class WorkerLogs:
    """The logs of this node's workers.

    A job whose workers are replaced again and again would fill the disk with logs: of those that
    have ended the newest `kept` stay. Where removing does not keep up, as on a file system that
    hangs, those of before are left.
    """

    def __init__(self, directory: Path, kept: int = KEPT) -> None:
        self._directory = directory
        self._kept = kept
        self._living: dict[str, Path] = {}
        self._ended: deque[Path] = deque(maxlen=10 * kept)

    def __contains__(self, worker: str) -> bool:
        return worker in self._living

    def path(self, worker: str) -> Path | None:
        """The log of a worker that has not ended."""
        return self._living.get(worker)

    def begin(self, worker: str) -> Path:
        """A worker is about to be started."""
        name = fitting(worker, LONGEST - len(_LONGEST_SUFFIX))
        self._living[worker] = self._directory / f"{name}.log"
        return self._living[worker]

    def adopt(self, worker: str, path: Path) -> None:
        """An earlier agent has started it."""
        self._living[worker] = path

    def end(self, worker: str) -> None:
        """The worker has ended."""
        path = self._living.pop(worker, None)
        if path is not None:
            self._ended.append(path)

    def next_stale(self) -> Path | None:
        """A log to remove, each once; None if there is none more."""
        return self._ended.popleft() if len(self._ended) > self._kept else None
