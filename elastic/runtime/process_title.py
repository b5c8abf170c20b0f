"""What ps(1), top(1) and killall(1) call a process: what it is, instead of how it was started."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import setproctitle

_NO_ENVIRONMENT = "SPT_NOENV"


def set_title(*words: str) -> None:
    """`elastic` and these words. Cut at the length of the command line that the process had."""
    _set_up()
    title = " ".join(("elastic", *words))
    setproctitle.setproctitle(title.encode("utf-8", "backslashreplace").decode())


def set_worker_title(worker: str, script: str, rank: int | None = None) -> None:
    """rank: in the present group; None before the first."""
    place = f" rank {rank}" if rank is not None else ""
    set_title("worker", f"{worker}{place}:", Path(script).name)


@functools.cache
def _set_up() -> None:
    """The title takes the place of the command line alone: by default it overwrites also the
    environment in /proc, by which the processes of a run are found. Once, at the first title of a
    process and its forks, before there are threads that may read the environment."""
    before = os.environ.get(_NO_ENVIRONMENT)
    os.environ[_NO_ENVIRONMENT] = "1"
    try:
        setproctitle.getproctitle()
    finally:
        if before is None:
            del os.environ[_NO_ENVIRONMENT]  # no business of the script's
        else:
            os.environ[_NO_ENVIRONMENT] = before
