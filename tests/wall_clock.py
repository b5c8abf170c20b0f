"""Sets the wall clock of real processes; their monotonic clocks run on."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

_LIBRARY = Path(str(files("libfaketime"))) / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"


class WallClock:
    """The wall clock of the processes that are started with `environment`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.offset_s = 0
        self.environment = {
            "LD_PRELOAD": str(_LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.set(0)

    @staticmethod
    def forget(pids: Iterable[int]) -> None:
        """Remove the shared memory that killed processes have left behind. All must have ended."""
        for pid in pids:
            for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
                Path("/dev/shm", name).unlink(missing_ok=True)

    def set(self, offset_s: int) -> None:
        """Put the clock this far ahead of the machine's from now on."""
        self.offset_s = offset_s
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.replace(self._file)
