"""How long steps take and how many samples a second that makes, as reported to the agent."""

from __future__ import annotations

import time

_SMOOTHING = 0.1  # weight of the newest step in the usual duration


class StepsClock:
    """Times steps from their begin to their commit."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last_commit: float | None = None
        self.step_s = 0.0
        """Usual time from one commit to the next, exponentially averaged; 0 while unknown."""
        self.samples_per_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def commit(self, samples: int) -> None:
        """It was committed, with this many samples of the whole group."""
        now = time.monotonic()
        if self._last_commit is not None:
            duration_s = now - self._last_commit
            weight = _SMOOTHING if self.step_s else 1.0
            self.step_s += weight * (duration_s - self.step_s)
            rate = samples / max(duration_s, 1e-9)
            self.samples_per_s += weight * (rate - self.samples_per_s)
        self._last_commit = now
        self._began = None

    def interrupt(self) -> None:
        """The group was lost or changes: the time until the next commit is no usual step."""
        self._began = None
        self._last_commit = None

    def in_step_s(self) -> float:
        """How long the step under way has lasted; 0 between steps."""
        began = self._began
        return time.monotonic() - began if began is not None else 0.0
