"""Signals that ask a command to leave its job: which of them is a second request, and what a worker
makes of one that was sent to every process of its node.

timeout(1) signals its command and then the command's process group; a wrapper hands on the Ctrl-C
that its terminal has sent to both. Nobody who does so means the second one, which saves nothing.

pkill(1), `scancel`, a service manager that signals a whole control group: all of them ask the job
to end, and mean well. The agent has the workers save and leave; workers that ended at once would
take what is to be saved with them. A signal that was meant for one worker alone ends it as usual, a
little later.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

from elastic.errors import ExitCode

LEAVE_SIGNALS: Mapping[signal.Signals, tuple[ExitCode, str]] = {
    signal.SIGINT: (ExitCode.INTERRUPTED, "Ctrl-C"),
    signal.SIGTERM: (ExitCode.TERMINATED, "SIGTERM"),
    # By default these would end a command that saves nothing: a terminal sends SIGQUIT at Ctrl-\,
    # a batch system gives notice of the end with one of the user's signals, or with the one for
    # processor time that is used up.
    signal.SIGQUIT: (ExitCode.TERMINATED, "SIGQUIT"),
    signal.SIGUSR1: (ExitCode.TERMINATED, "SIGUSR1"),
    signal.SIGUSR2: (ExitCode.TERMINATED, "SIGUSR2"),
    signal.SIGXCPU: (ExitCode.TERMINATED, "SIGXCPU"),
}
"""The exit code and the reason of each. SIGHUP means different things to different commands."""

STRAY_SIGNALS = (signal.SIGHUP, *LEAVE_SIGNALS)
"""Sent to all processes of a node at once, by pkill(1), a service manager or a batch system. They
are for the agent, which ends the others when their work is saved."""

ONE_SIGNAL_S = 0.2
"""Less than anybody takes to think again."""


class SignalCount:
    """Counts signals; those that come within `ONE_SIGNAL_S` of the first are the first."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_another(self, now_s: float) -> bool:
        """One came at `now_s`, of any clock: is it the second, or a later one?"""
        if self._first_at is None:
            self._first_at = now_s
        return now_s - self._first_at > ONE_SIGNAL_S


PATIENCE_S = 2.0
"""For the agent to say that it has heard the same signal."""


class StraySignals:
    """In a worker: takes the signals' default actions over, unless the script has handlers of its
    own."""

    def __init__(self) -> None:
        self._node_leaves = threading.Event()
        self._ends_by: int | None = None

    def take_over(self) -> None:
        """From now on, in this process alone. On the main thread; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            return
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: signal.getsignal(n) for n in STRAY_SIGNALS}
        taken = {n: handler for n, handler in before.items() if handler in defaults}
        for number in taken:
            signal.signal(number, self._nothing if number == signal.SIGHUP else self._wait)

        def in_child() -> None:
            """As the script's own processes would find them: loaders are ended by SIGTERM."""
            for number, handler in taken.items():
                if signal.getsignal(number) in (self._nothing, self._wait):
                    signal.signal(number, handler)

        os.register_at_fork(after_in_child=in_child)

    def node_leaves(self) -> None:
        """The agent ends this worker when it has left; on any thread."""
        self._node_leaves.set()

    def _nothing(self, _number: int, _frame: FrameType | None) -> None:
        """SIGHUP has an agent begin anew, and workers train on."""

    def _wait(self, number: int, _frame: FrameType | None) -> None:
        if self._node_leaves.is_set():
            return
        if self._ends_by == number:  # from below
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
