"""Signals that ask a command to leave its job, and which of them is a second request.

timeout(1) signals its command and then the command's process group; a wrapper hands on the Ctrl-C
that its terminal has sent to both. Nobody who does so means the second one, which saves nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

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
