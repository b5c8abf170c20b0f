"""How long steps take and how many samples a second that makes, as reported to the agent."""

from __future__ import annotations

import time

from elastic.core.histogram import STEP_BOUNDS_S, Histogram
from elastic.worker.compilation import COMPILATIONS, Compilations
from elastic.worker.pace import Pace
from elastic.worker.place import CurrentPlace
from elastic.worker.time_spent import TimeSpent

_SMOOTHING = 0.1  # weight of the newest step in the usual duration
_STANDSTILL_S = 1.5  # without a beat, of which there is one in 0.6 s at least
_MOST = 10.0  # times the usual duration is the most that one step counts for


class StepsClock:
    """Times steps from their begin to their commit.

    The usual duration leaves out the first step of a group and those that compile. A peer's step
    that compiles is not known here, and makes this one wait: no step counts for more than ten.
    """

    def __init__(self, compilations: Compilations = COMPILATIONS) -> None:
        self.place = CurrentPlace()
        """Where the script's thread is."""
        self.collectives_reduced: int | None = None
        """How many collectives the group had begun when the newest step was reduced; None in a new
        group, in which members have sent each other different numbers of messages."""
        self._compilations = compilations
        self._compiled = compilations.count
        self._began: float | None = None
        self._last_commit: float | None = None
        self._sets_up_since: float | None = None
        self._waits_since: float | None = None
        self._alive_at: float | None = None
        self._stood = (0.0, 0.0)
        self.in_call = False
        """The script is inside a call that it makes together with the others."""
        self.step_s = 0.0
        """Usual time from one commit to the next, exponentially averaged; 0 while unknown."""
        self.samples_per_s = 0.0
        self.durations = Histogram(STEP_BOUNDS_S)
        """From one commit to the next, of all steps but the first ones of a group."""
        self.samples = 0
        """Committed while this process was a member."""
        self.spent = TimeSpent()
        """What all of the time since the first group went into."""
        self.pace = Pace(self.spent)
        """What each part of a step takes here, for a comparison of ranks."""
        self.world_size = 1
        self.global_batch = 0
        """Samples of the newest step, of the whole group."""
        self.given_up = 0
        """Steps that were begun and are begun again, since somebody has taken the count."""

    def begin(self) -> None:
        """A step begins."""
        self._compilations.watch()
        now = self._began = time.monotonic()
        last = self._last_commit
        if last is not None:
            self.pace.between_s += now - last

    def entered(
        self, generation: int, *, join_s: float, sync_s: float, world_size: int = 1
    ) -> None:
        """The group can train, after so long a time for its parts."""
        self.world_size = world_size
        self.spent.entered(time.monotonic(), generation, join_s=join_s, sync_s=sync_s)

    def commit(self, samples: int, committed: int = 0) -> None:
        """It was committed, with this many samples of the whole group: so many steps are."""
        now = time.monotonic()
        self.spent.commit(now, self.step_s, committed)
        compiled, self._compiled = self._compiled, self._compilations.count
        self.samples += samples
        self.global_batch = samples
        if self._last_commit is not None:
            self.durations.observe(now - self._last_commit)
            if compiled == self._compiled:
                self._note(now - self._last_commit, samples)
        self._last_commit = now
        self._began = None
        pace = self.pace
        if pace.arrival.learning:
            pace.arrival.learned()
        if not committed & pace.mask:
            pace.put_down(committed, self.step_s, self.world_size)

    def sets_up(self) -> None:
        """A new group is set up for training: all wait there for one that hangs."""
        self._sets_up_since = time.monotonic()

    def is_set_up(self) -> None:
        """Now a script may do as it likes until it begins a step."""
        self._sets_up_since = None

    def waits(self) -> None:
        """For the others to come to a call of the script."""
        self._waits_since = time.monotonic()

    def is_met(self) -> None:
        """They have come, or the group is lost."""
        since, self._waits_since = self._waits_since, None
        if since is not None:
            self.spent.called(time.monotonic() - since)

    def called(self, began: float) -> None:
        """The script has made a call together with the others."""
        self.spent.called(time.monotonic() - began)

    def saved(self, began: float) -> None:
        """A save has held it up; inside of a call it is no time of that."""
        elapsed_s = time.monotonic() - began
        self.spent.saved(elapsed_s)
        if self.in_call:
            self.spent.called(-elapsed_s)

    def ends(self) -> None:
        """No step follows."""
        self.spent.settle(time.monotonic())

    def alive(self) -> None:
        """A beat of the reporting thread: of a process that was stopped there is none."""
        now, before = time.monotonic(), self._alive_at
        if before is not None and now - before > _STANDSTILL_S:
            self._stood = before, now
        self._alive_at = now

    def waiting_s(self) -> float:
        """How long it has waited for them; 0 if it does not."""
        return self._lasts_s(self._waits_since)

    def interrupt(self) -> None:
        """The group was lost or changes: the time until the next commit is no usual step."""
        self.spent.left(time.monotonic(), in_step=self._began is not None)
        self._began = self._sets_up_since = None
        self._last_commit = self.collectives_reduced = None

    def give_up(self) -> None:
        """A step that was begun does not count: it is computed again."""
        self.given_up += 1

    def in_step_s(self) -> float:
        """How long the step under way has lasted; 0 between steps."""
        return self._lasts_s(self._began)

    def under_way_s(self) -> float:
        """The same, and before the first step of a group how long setting it up has lasted."""
        since = self._sets_up_since
        return self._lasts_s(since) if since is not None else self.in_step_s()

    @property
    def first_step(self) -> bool:
        """This process has committed no step in its present group."""
        return self._last_commit is None

    def _lasts_s(self, since: float | None) -> float:
        """The time since then in which the process was not stopped, as by a paused container: that
        is no hang."""
        if since is None:
            return 0.0
        now, alive_at, (began, ended) = time.monotonic(), self._alive_at, self._stood
        lasts_s = now - since - max(0.0, ended - max(began, since))
        if alive_at is not None and now - alive_at > _STANDSTILL_S:  # and has not beaten yet
            lasts_s -= now - max(alive_at, since)
        return max(lasts_s, 0.0)

    def _note(self, duration_s: float, samples: int) -> None:
        rate = samples / max(duration_s, 1e-9)
        if self.step_s == 0.0:
            self.step_s, self.samples_per_s = duration_s, rate
            return
        counted_s = min(duration_s, _MOST * self.step_s)
        self.step_s += _SMOOTHING * (counted_s - self.step_s)
        self.samples_per_s += _SMOOTHING * (rate - self.samples_per_s)
