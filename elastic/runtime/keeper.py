"""Runs a command and, when it ends, ends the processes it leaves.

`keeper DIRECTORY LEASE COMMAND...`

An agent and its zygote end each other's orphans, but both can be killed at the same instant. This
third process only waits, so that everything a script has started is ended as long as one of the
three is alive. The keeper removes `DIRECTORY` if its run is over.

It also ends the workers, which are the command's children, when their node's lease to train is
over: the agent may be stopped, and a worker may be stopped or in a long step. `LEASE` is the
descriptor of the lease's page, which the command inherits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.orphans import (
    KEEPER_GONE,
    adopt_orphans,
    children,
    end_children,
    is_cleaner,
    kill_descendants,
    set_parent_death_signal,
)
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import remove_if_abandoned
from elastic.runtime.training_lease import TrainingLease

_LOOK_S = 0.25


def main(argv: list[str]) -> NoReturn:
    """Run the command `argv[3:]` and end as it ended: with its exit code or by its signal."""
    directory, descriptor, command = argv[1], int(argv[2]), argv[3:]
    lease = TrainingLease(descriptor)
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # taken by sigtimedwait
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        set_parent_death_signal(keeper, KEEPER_GONE)
        os.execv(command[0], command)
    for number in STRAY_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    close_inherited(lease.descriptor)
    set_title("keeper")
    status = _await(child, lease)
    end_children()
    remove_if_abandoned(Path(directory))
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))


def close_inherited(kept: int) -> None:
    """Close other inherited descriptors, so that they close when their own process ends."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(descriptor)


def _await(child: int, lease: TrainingLease) -> int:
    """Return the child's wait status. Meanwhile reap orphans that end, and end the workers when
    their lease is over.

    It looks at the lease again and again, since timers do not count the time of a suspension.
    """
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == child:
                return ended[1]
        _end_workers(child, lease)


def _end_workers(parent: int, lease: TrainingLease) -> None:
    """Kill the processes that `parent` has forked under a lease that is over now."""
    epoch = lease.epoch
    if not lease.is_over(time.clock_gettime(time.CLOCK_BOOTTIME)):
        return
    with contextlib.suppress(OSError):  # the parent is gone, and so are its workers
        workers = [child for child in children(parent) if not is_cleaner(child)]
        if lease.epoch == epoch:  # else some may have been forked under the next lease
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGSTOP)  # while it lives, its descendants are known
                    kill_descendants(worker)
                    os.kill(worker, signal.SIGKILL)


def _end_by(number: int) -> None:
    """End by this signal, so that the agent sees how the command ended."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv)
