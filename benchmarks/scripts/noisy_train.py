"""Trains as elastic_train does, while one worker writes to its log without end.

noisy_train.py --log-dir DIRECTORY --noise {none,no-newline,lines} ...

The worker whose pid is in the file `DIRECTORY`/../noise (see `NOISE`) writes once that file exists.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from benchmarks.scripts import elastic_train

NOISE = "noise"
_CHUNK = b"x" * 2**20
_CHUNKS_A_SECOND = 2**30 / len(_CHUNK) / 60  # 1 GiB a minute
_LINES = b"a line of a log of some sixty characters, as scripts write them\n" * 2000
_LINES_A_SECOND = 200_000
_POLL_S = 0.05


def main() -> None:
    at = sys.argv.index("--noise")
    kind = sys.argv[at + 1]
    del sys.argv[at : at + 2]
    place = Path(sys.argv[sys.argv.index("--log-dir") + 1]).parent
    if kind != "none":
        threading.Thread(target=_wait_and_write, args=(kind, place / NOISE), daemon=True).start()
    elastic_train.main()


def _wait_and_write(kind: str, named: Path) -> None:
    while not named.exists():
        time.sleep(_POLL_S)
    if int(named.read_text()) != os.getpid():
        return
    if kind == "no-newline":
        _write(_CHUNK, _CHUNKS_A_SECOND)
    else:
        _write(_LINES, _LINES_A_SECOND / _LINES.count(b"\n"))


def _write(block: bytes, times_a_second: float) -> None:
    began, written = time.monotonic(), 0
    while True:
        while written < len(block) * times_a_second * (time.monotonic() - began):
            written += os.write(1, block)
        time.sleep(1 / times_a_second)


if __name__ == "__main__":
    main()
