"""Sets the name that ps(1), top(1) and killall(1) show: a process's role, not its command."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import setproctitle

_NO_ENVIRONMENT = "SPT_NOENV"


def set_title(*words: str) -> None:
    """Set the title to `elastic` and these words, cut to the length of the command line."""
    _set_up()
    title = " ".join(("elastic", *words))
    setproctitle.setproctitle(title.encode("utf-8", "backslashreplace").decode())


def set_worker_title(worker: str, script: str, rank: int | None = None) -> None:
    """Set a worker's title. rank: in the present group; None before the first group."""
    place = f" rank {rank}" if rank is not None else ""
    set_title("worker", f"{worker}{place}:", Path(script).name)


@functools.cache
def _set_up() -> None:
    """Let titles replace only the command line: by default they also overwrite the environment in
    /proc, by which a run's processes are found. This runs once for a process and its forks, at the
    first title, before there are threads that may read the environment."""
    before = os.environ.get(_NO_ENVIRONMENT)
    os.environ[_NO_ENVIRONMENT] = "1"
    try:
        setproctitle.getproctitle()
    finally:
        if before is None:
            del os.environ[_NO_ENVIRONMENT]  # the script must not see it
        else:
            os.environ[_NO_ENVIRONMENT] = before
