"""What a worker spends its time on, from commit to commit: sums that its reports carry."""

from __future__ import annotations

import time
from collections import deque

from elastic.v1 import job_pb2 as pb
from elastic.v1 import timeline_pb2

MOST_STRETCHES = 1000
"""That are remembered: of steps of 0.1 s, those of the last minutes."""
_Stretch = tuple[int, int, int, float, float, float, float, float, float, float]
"""In the order of the message, with the instants of its begin and end on the clock of
time.monotonic."""


class TimeSpent:
    """All of the time since the first group, up to the newest commit or entry into a group.

    The script's thread adds to it, others read it. What was lost with a group is told together
    with the group that follows, since that is when its cause is known.
    """

    def __init__(self) -> None:
        self.generation = 0
        """The group that was entered last; 0: there was none."""
        self.committed = 0
        self.steps = 0
        self.steps_s = self.data_s = self.calls_s = self.saves_s = self.own_s = 0.0
        self.first_steps_s = self.given_up_s = self.regroup_s = self.join_s = self.sync_s = 0.0
        self._at = 0.0  # up to which all is counted
        self._in_group = False
        self._first = True
        self._given_up_s = self._left_s = 0.0  # not told before the next group
        self._data_s = self._calls_s = self._saves_s = 0.0  # since `_at`
        self._fetched_at = 0.0
        self._stretches: deque[_Stretch] = deque(maxlen=MOST_STRETCHES)

    def entered(self, now: float, generation: int, *, join_s: float, sync_s: float) -> None:
        """The group can train."""
        if self.generation:
            kind = timeline_pb2.Stretch.WHAT_REGROUP
            steps = (kind, generation, self.committed, self._at, now, 0.0, 0.0, 0.0)
            self._stretches.append((*steps, join_s, sync_s))
            self.given_up_s += self._given_up_s
            self.regroup_s += self._left_s + now - self._at
            self.join_s += join_s
            self.sync_s += sync_s
        self._given_up_s = self._left_s = 0.0
        self.generation, self._at = generation, now
        self._in_group = self._first = True
        self._begin()

    def fetched(self, began: float, now: float) -> None:
        """Samples have come from the loader."""
        self._data_s += now - began
        self._fetched_at = now

    def called(self, seconds: float) -> None:
        """The script was in a call that it makes together with the others."""
        self._calls_s += seconds

    def saved(self, seconds: float) -> None:
        """Training was held up to save."""
        self._saves_s += seconds

    def commit(self, now: float, usual_s: float, committed: int) -> None:
        """A step was committed. usual_s: how long steps last; 0 while unknown."""
        elapsed_s, beside_s = now - self._at, self._calls_s + self._saves_s
        self._stretches.append(
            (
                *(timeline_pb2.Stretch.WHAT_STEP, self.generation, committed, self._at, now),
                *(self._data_s, self._calls_s, self._saves_s, 0.0, 0.0),
            )
        )
        if self._first:
            beyond_s = max(0.0, elapsed_s - usual_s - beside_s)
            self.first_steps_s += beyond_s
            self.steps_s += elapsed_s - beyond_s
            self._first = False
        else:
            self.steps_s += elapsed_s
            self.data_s += self._data_s
            self.own_s += max(0.0, self._fetched_at - self._at - beside_s)
        self.steps += 1
        self.calls_s += self._calls_s
        self.saves_s += self._saves_s
        self.committed = committed
        self._at = now
        self._begin()

    def settle(self, now: float) -> None:
        """No step may follow: what there was since the last one is told all the same."""
        if self._in_group:
            self.steps_s += now - self._at
            self.calls_s += self._calls_s
            self.saves_s += self._saves_s
            self._at = now
            self._begin()

    def left(self, now: float, *, in_step: bool) -> None:
        """The group is lost, or left at a boundary. in_step: a step was begun."""
        if self._in_group:
            elapsed_s = now - self._at
            given_up_s = elapsed_s if in_step else min(elapsed_s, self._calls_s)
            if given_up_s > 0.0:
                kind, began = timeline_pb2.Stretch.WHAT_GIVEN_UP, now - given_up_s
                this = (kind, self.generation, self.committed, began, now)
                self._stretches.append((*this, 0.0, 0.0, 0.0, 0.0, 0.0))
            self._given_up_s += given_up_s
            self._left_s += elapsed_s - given_up_s
            self._in_group, self._at = False, now
            self._begin()

    def newest(self, most: int) -> list[timeline_pb2.Stretch]:
        """The newest stretches of it, oldest first; asked for on another thread."""
        ahead_s = time.time() - time.monotonic()
        return [
            timeline_pb2.Stretch(
                what=timeline_pb2.Stretch.What.Name(what),
                generation=generation,
                step=step,
                began_unix_s=began + ahead_s,
                lasted_s=ended - began,
                data_s=data_s,
                calls_s=calls_s,
                saves_s=saves_s,
                join_s=join_s,
                sync_s=sync_s,
            )
            for (
                what,
                generation,
                step,
                began,
                ended,
                data_s,
                calls_s,
                saves_s,
                join_s,
                sync_s,
            ) in list(self._stretches)[-most:]
        ]

    def to_pb(self) -> pb.TimeSpent:
        """As it is now."""
        return pb.TimeSpent(
            generation=self.generation,
            committed=self.committed,
            steps=self.steps,
            steps_s=self.steps_s,
            data_s=self.data_s,
            calls_s=self.calls_s,
            saves_s=self.saves_s,
            own_s=self.own_s,
            first_steps_s=self.first_steps_s,
            given_up_s=self.given_up_s,
            regroup_s=self.regroup_s,
            join_s=self.join_s,
            sync_s=self.sync_s,
        )

    def _begin(self) -> None:
        self._data_s = self._calls_s = self._saves_s = 0.0
