"""Runs a command and outlives it, to end whatever it leaves behind: `keeper DIRECTORY COMMAND...`.

An agent and its zygote end each other's orphans, but both can be killed at one instant. This third
process does nothing but wait, so that anything a script has started is ended as long as one of
the three is alive. `DIRECTORY` is removed if its run is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.orphans import KEEPER_GONE, adopt_orphans, end_children, tell_of_parents_end
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import remove_if_left


def main(argv: list[str]) -> NoReturn:
    """Run `argv[2:]`; end as it ended."""
    directory, command = argv[1], argv[2:]
    adopt_orphans()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        tell_of_parents_end(keeper, KEEPER_GONE)
        os.execv(command[0], command)
    for number in STRAY_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _let_go_of_inherited()
    set_title("keeper")
    status = _await(child)
    end_children()
    remove_if_left(Path(directory))
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))


def _let_go_of_inherited() -> None:
    """The command's sockets are to close when it ends."""
    for descriptor in os.listdir("/proc/self/fd"):
        if int(descriptor) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(descriptor))


def _await(child: int) -> int:
    """Its wait status. Orphans that end meanwhile are collected."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _end_by(number: int) -> None:
    """So that the agent sees how the command ended."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv)
