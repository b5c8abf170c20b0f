"""Which signals to end a command are another one, and which the same one that came twice.

timeout(1) signals its command and then the command's process group; a wrapper hands on the Ctrl-C
that its terminal has sent to both. Nobody who does so means the second one, which saves nothing.
"""

from __future__ import annotations

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
