"""Interprets signals that ask a command to leave its job, in the command and in its workers.

A second signal makes a command end without saving. But some programs signal twice and mean one
request: timeout(1) signals its command and then the command's process group, and a wrapper forwards
the Ctrl-C that the terminal has sent to both. `SignalCount` counts such signals as one.

pkill(1), `scancel` or a service manager may signal all processes of a node, and want the job to end
in order. Then the agent has the workers save and leave; workers that ended at once could not save.
So `StraySignals` makes a worker wait for its agent. A signal for one worker alone still ends that
worker, `PATIENCE_S` later.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

from elastic.errors import ExitCode

RESTART_SIGNAL = signal.SIGRTMIN + 1
"""Ends an agent at once and leaves its workers to the next agent: `RestartKillSignal=` of the unit.
For other commands it is one more signal to leave, since nothing of theirs can be adopted."""

LEAVE_SIGNALS: Mapping[int, tuple[ExitCode, str]] = {
    signal.SIGINT: (ExitCode.INTERRUPTED, "Ctrl-C"),
    signal.SIGTERM: (ExitCode.TERMINATED, "SIGTERM"),
    # By default these would end a command before it saves. A terminal sends SIGQUIT at Ctrl-\. A
    # batch system announces the end with SIGUSR1 or SIGUSR2, or with SIGXCPU when processor time is
    # used up.
    signal.SIGQUIT: (ExitCode.TERMINATED, "SIGQUIT"),
    signal.SIGUSR1: (ExitCode.TERMINATED, "SIGUSR1"),
    signal.SIGUSR2: (ExitCode.TERMINATED, "SIGUSR2"),
    signal.SIGXCPU: (ExitCode.TERMINATED, "SIGXCPU"),
    RESTART_SIGNAL: (ExitCode.TERMINATED, "SIGRTMIN+1"),
}
"""Exit code and reason of each signal. SIGHUP is missing: its meaning depends on the command."""

STRAY_SIGNALS = (signal.SIGHUP, *LEAVE_SIGNALS)
"""Signals that pkill(1), a service manager or a batch system may send to all processes of a node.
They are meant for the agent, which ends the others when their work is saved."""

ONE_SIGNAL_S = 0.2
"""Shorter than the time a person needs to decide on a second signal."""


class SignalCount:
    """Counts signals; those within `ONE_SIGNAL_S` of the first one count as one with it."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_another(self, now_s: float) -> bool:
        """Count a signal that came at `now_s`, of any clock; return whether it is a second one."""
        if self._first_at is None:
            self._first_at = now_s
        return now_s - self._first_at > ONE_SIGNAL_S


def unblock_signals() -> None:
    """Call this once the handlers are in place: the parent process may have blocked the signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STRAY_SIGNALS)


def on_hangup(
    loop: asyncio.AbstractEventLoop, *, closed: Callable[[], None], otherwise: Callable[[], None]
) -> None:
    """Have SIGHUP call `closed` once this process's terminal is gone; `otherwise` while it is there
    and for a process without one. Under nohup(1) SIGHUP stays ignored."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return
    had_terminal = _has_terminal()

    def hang_up() -> None:
        (closed if had_terminal and not _has_terminal() else otherwise)()

    loop.add_signal_handler(signal.SIGHUP, hang_up)


def _has_terminal() -> bool:
    """Return whether a terminal controls this process: closing it sends SIGHUP, as operators do."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


HANGUP_IGNORED = (
    "SIGHUP changes nothing: replaced certificates are read by themselves, and everything else is "
    "taken up by a restart, which training survives (docs/BARE_METAL.md)"
)

PATIENCE_S = 2.0
"""Seconds in which the agent must say that it got the same signal."""


class StraySignals:
    """Replaces the signals' default actions in a worker, unless the script has own handlers."""

    def __init__(self) -> None:
        self._node_leaves = threading.Event()
        self._ends_by: int | None = None

    def take_over(self) -> None:
        """Install the handlers in this process, not its children; only works on the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: signal.getsignal(n) for n in STRAY_SIGNALS}
        taken = {n: handler for n, handler in before.items() if handler in defaults}
        for number in taken:
            ignored = number in (signal.SIGHUP, RESTART_SIGNAL)
            signal.signal(number, self._nothing if ignored else self._wait)

        def in_child() -> None:
            """Restore the defaults in the script's own processes: SIGTERM must end loaders."""
            for number, handler in taken.items():
                if signal.getsignal(number) in (self._nothing, self._wait):
                    signal.signal(number, handler)

        os.register_at_fork(after_in_child=in_child)

    def node_leaves(self) -> None:
        """Ignore the signals: the agent ends this worker after it has left. Any thread may call."""
        self._node_leaves.set()

    def _nothing(self, _number: int, _frame: FrameType | None) -> None:
        """Ignore a signal at which agents go on, or leave their workers to the next agent."""

    def _wait(self, number: int, _frame: FrameType | None) -> None:
        if self._node_leaves.is_set():
            return
        if self._ends_by == number:  # sent by `_end_unless_left`
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        threading.Thread(
            target=self._end_unless_left, args=(number,), name="elastic-signal", daemon=True
        ).start()

    def _end_unless_left(self, number: int) -> None:
        if not self._node_leaves.wait(PATIENCE_S):
            self._ends_by = number
            os.kill(os.getpid(), number)  # only the main thread may restore the default action
