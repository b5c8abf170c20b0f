"""The session's way through groups: enters them, leaves them, and survives their loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from elastic.core.membership import Purpose
from elastic.errors import GroupLost
from elastic.worker.control import Control
from elastic.worker.group.process_group import Group, is_group_loss
from elastic.worker.runs import Runs
from elastic.worker.state.job_state import JobState
from elastic.worker.steps_clock import StepsClock
from elastic.worker.synchronisation import Synchronisation

T = TypeVar("T")


class JobStopping(SystemExit):
    """Raised at a step boundary when the job is to be left; unwinds the script."""


class Outfit(Protocol):
    """What the session puts around a group."""

    def set_up(self, group: Group) -> None:
        """The members have one state: wrap the models, deal the data."""
        ...

    def tear_down(self) -> None:
        """The group is gone or about to be."""
        ...


class Participation:
    """This worker's place among the groups of the job, seen from the script's thread."""

    def __init__(self, control: Control, state: JobState, clock: StepsClock) -> None:
        self._control = control
        self._membership = control.membership
        self._state = state
        self._clock = clock
        self._runs = Runs()
        self._sync = Synchronisation(
            state,
            self._runs,
            restore=control.checkpoints.restore,
            on_dropped=self._membership.drop_state,
        )
        self._outfit: Outfit | None = None
        self._in_run = False
        self.group: Group | None = None
        """The group that everything is set up for."""

    def equip(self, outfit: Outfit) -> None:
        """What to set up in each group."""
        self._outfit = outfit

    # ---- at a step boundary

    def at_boundary(self) -> None:
        """Between two steps: change the group if it was superseded, join if there is none."""
        while self.group is None or self._membership.leaves_here():
            if self.group is not None:
                self._drop()
                self._membership.leave()
            self.enter()

    def enter(self) -> None:
        """Block until in a group, with everything set up for its first step."""
        while True:
            group = self._control.enter(self._synchronise)
            try:
                self._arrive(group)
            except Exception as error:
                if not self.is_loss(error):
                    raise
                self.lose(error)
                continue
            return

    # ---- when it breaks

    def is_loss(self, error: Exception) -> bool:
        """Does the error say that the group is lost, and may another follow?"""
        return self._control.recovers and is_group_loss(error, self.group)

    def lose(self, error: Exception, *, torn: bool = False) -> None:
        """The group is lost. torn: the state is between two steps, of use to nobody."""
        self._drop()
        if torn:
            self._sync.intact = False
        self._membership.lost(error)

    # ---- collectives outside of steps

    def run(self, call: Callable[[], T]) -> T:
        """`call()` in a group; again in the next one if that was lost."""
        self._in_run = True
        self._membership.enter_run()
        try:
            while True:
                if self.group is None:
                    self.enter()
                try:
                    result = call()
                except Exception as error:
                    if not self.is_loss(error):
                        raise
                    self.lose(error)
                    continue
                self._runs.completed(call)
                return result
        finally:
            self._in_run = False
            self._membership.leave_run()

    def committed(self) -> None:
        """A step was committed."""
        self._runs.forget()
        self._control.committed()

    def require_current(self) -> None:
        """Raise GroupLost if the group was aborted."""
        if self.group is None:
            raise GroupLost("there is no group")
        self.group.check()

    # ---- inside

    def _synchronise(self, group: Group) -> int:
        """Come to one state, and repeat for others the run that only they have not completed."""
        committed = self._sync.synchronise(group, in_run=self._in_run)
        first = self._sync.outcome.repeat_runs_from
        if first < self._runs.done:
            try:
                self._set_up(group)
                self._runs.repeat(first)
            finally:
                self._drop()
        return committed

    def _arrive(self, group: Group) -> None:
        self._set_up(group)
        checkpoints = self._control.checkpoints
        if group.generation.purpose is Purpose.SAVE_AND_LEAVE:
            checkpoints.save_and_wait(self._state, group, self._membership.must_leave)
            raise JobStopping(0)
        checkpoints.save_on_entry(self._state, group)
        self._control.entered(group, self._sync.outcome)

    def _set_up(self, group: Group) -> None:
        self.group = group
        if self._outfit is not None:
            self._outfit.set_up(group)

    def _drop(self) -> None:
        self._clock.interrupt()
        if self._outfit is not None:
            self._outfit.tear_down()
        self.group = None
