"""Runs a command and, when it ends, ends the processes it leaves: `keeper DIRECTORY COMMAND...`.

An agent and its zygote end each other's orphans, but both can be killed at the same instant. This
third process only waits, so that everything a script has started is ended as long as one of the
three is alive. The keeper removes `DIRECTORY` if its run is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.orphans import (
    KEEPER_GONE,
    adopt_orphans,
    end_children,
    set_parent_death_signal,
)
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import remove_if_abandoned


def main(argv: list[str]) -> NoReturn:
    """Run the command `argv[2:]` and end as it ended: with its exit code or by its signal."""
    directory, command = argv[1], argv[2:]
    adopt_orphans()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        set_parent_death_signal(keeper, KEEPER_GONE)
        os.execv(command[0], command)
    for number in STRAY_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _close_inherited()
    set_title("keeper")
    status = _await(child)
    end_children()
    remove_if_abandoned(Path(directory))
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))


def _close_inherited() -> None:
    """Close inherited descriptors, so that the command's sockets close when it ends."""
    for descriptor in os.listdir("/proc/self/fd"):
        if int(descriptor) > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(descriptor))


def _await(child: int) -> int:
    """Return the child's wait status; reap orphans that end meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _end_by(number: int) -> None:
    """End by this signal, so that the agent sees how the command ended."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv)
