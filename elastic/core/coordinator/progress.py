"""How far the job is, how long a step usually takes, what shows that it gets no further, and who
kept the others waiting in the last hang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.core.coordinator.events import ProgressReported
from elastic.core.diagnosis import Diagnosis, Odd
from elastic.core.membership import WorkerId, WorkerStatus

_STUCK_FLOOR_S, _STUCK_FACTOR, _STUCK_MARGIN_S = 0.5, 1.25, 0.3
_SLOW_FLOOR_S = 1.0  # shorter ones are the scheduler's noise
_LAGS_FACTOR, _LAGS_FLOOR_S = 3.0, 1.0  # of a step of which it is asked where the members are
_LAGS_EVERY_S = 30.0
_ANSWER_HOLDS_S = 3.0
_MOST_STEPS_AHEAD = 20  # more would only wait: steps this short cost little if news comes late


@dataclass(frozen=True, kw_only=True, slots=True)
class StallPolicy:
    """A step that lasts longer than max(floor, factor x usual step) is stalled."""

    floor_s: float = 60.0
    """0 turns the watch off."""
    factor: float = 10.0
    first_step_s: float = 600.0
    """The floor for the first step of a group, and for one in which a member compiles. 0: these
    are never stalled."""
    pause_s: float = 600.0
    """How long members wait for one that is between two steps, or in a call of the script. 0: for
    ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _InCall:
    """What a member inside a call of the script has answered."""

    at: float
    collectives: int
    quiet_s: float


class ProgressWatch:
    """Follows the reports of rank 0, and whether any member compiles."""

    def __init__(self, policy: StallPolicy) -> None:
        self._policy = policy
        self._step_s = 0.0
        self._in_step_s = 0.0
        self._observed_at = self._stuck_since = 0.0
        self._under_way = 0
        """The step to which `_in_step_s` belongs: steps committed before it."""
        self._first_step = False
        self._compiles_in = -1
        """The last step in which a member was known to compile."""
        self._idle_since: float | None = None
        """Rank 0 neither is in a step nor waits for others; it may be in a call of the script."""
        self._waiting_s = 0.0
        self._in_calls: dict[WorkerId, _InCall] = {}
        self._lag_told: tuple[int, float] | None = None
        """The last step of which it was asked why it lasts, and when."""
        self._advanced_at: float | None = None
        self._breaks_at_step: tuple[int, int] = (0, -1)
        self.committed = 0
        self.stuck = False
        """The last member that was asked waits in its step for longer than usual."""
        self.awaited = False
        """Members that were asked have waited for another one for longer than it may pause."""

    def observe(
        self,
        committed: int,
        now: float,
        *,
        step_s: float = 0.0,
        in_step_s: float = 0.0,
        first_step: bool = False,
        waiting_s: float = 0.0,
    ) -> float:
        """Take the report of rank 0 of the present group, whose count is right also if it is
        lower than before: the job may have had to go back to a checkpoint.

        step_s: usual duration of a step. in_step_s: how long the step under way has lasted; 0
        between steps, where a script may evaluate for as long as it likes. first_step: it is the
        first one of the group. waiting_s: how long it has waited for others to come to a call.

        Returns how long the step has lasted that was under way before, if that was suspiciously
        long and it is over now; else 0. While an agent or its stream is away no reports come: other
        steps that are over as well are taken for usual ones, and tell nothing of one among many.
        """
        if in_step_s > 0.0 or waiting_s > 0.0:
            self._idle_since = None
        elif self._idle_since is None or committed != self._under_way:
            self._idle_since = now
        self._waiting_s = waiting_s
        slow_s = self._slow_step_s(committed, now - in_step_s, step_s or self._step_s)
        self._in_step_s, self._under_way, self._first_step = in_step_s, committed, first_step
        self._observed_at = now
        self._note_usual(step_s)
        self.goes_on_from(committed)
        self.advance(committed, now)
        return slow_s

    def lags_s(self, now: float) -> float:
        """How long the step under way has lasted, if that is three usual steps, long before it
        counts as stalled: each time once, and again only for another step after half a minute.
        Else 0."""
        lasts_s = self._in_step_s
        excused = self._first_step or self._under_way <= self._compiles_in or self._step_s <= 0.0
        if excused or lasts_s <= max(_LAGS_FLOOR_S, _LAGS_FACTOR * self._step_s) or self.stalled:
            return 0.0
        if self._lag_told is not None:
            step, at = self._lag_told
            if step == self._under_way or now - at < _LAGS_EVERY_S:
                return 0.0
        self._lag_told = self._under_way, now
        return lasts_s

    def goes_on_from(self, committed: int) -> None:
        """A new group has come to one state: the job may have had to go back for it."""
        self.committed = min(committed, self.committed)

    def advance(self, committed: int, now: float) -> None:
        """Some member has committed this many steps; a count that is behind changes nothing."""
        if committed > self.committed or self._advanced_at is None:
            self.committed = max(committed, self.committed)
            self._advanced_at = now

    def compiles(self, committed: int) -> None:
        """A member runs torch.compile with so many steps committed: the others wait in that step.

        The step stays excused when that is over, for as long as it lasts.
        """
        self._compiles_in = max(committed, self._compiles_in)

    def asks(self, now: float) -> bool:
        """Rank 0 does nothing that is known to need the others: do they wait for it?"""
        patience_s = self._policy.pause_s
        return (
            patience_s > 0.0
            and self._idle_since is not None
            and (now - self._idle_since > patience_s)
        )

    def answered(self, answer: ProgressReported, now: float) -> None:
        """What a member of the present group says of itself when it is asked.

        It waits in a step, or for others to come to a call, or in a collective of a call in which
        others have not come as far.
        """
        self.probed(answer.committed, now, step_s=answer.step_s, in_step_s=answer.in_step_s)
        patience_s = self._policy.pause_s
        if not self.asks(now) or answer.committed <= self._compiles_in:
            return
        if max(answer.in_step_s, answer.waiting_s) > patience_s:
            self.awaited = True
        if answer.collectives:
            self._in_calls[answer.worker] = _InCall(
                at=now, collectives=answer.collectives, quiet_s=answer.quiet_s
            )
        known = [c for c in self._in_calls.values() if now - c.at < _ANSWER_HOLDS_S]
        furthest = max((c.collectives for c in known), default=0)
        waiting = [c.quiet_s for c in known if c.collectives == furthest]
        if len(waiting) < len(known) and min(waiting) > patience_s:
            self.awaited = True

    def probed(self, committed: int, now: float, *, step_s: float, in_step_s: float) -> None:
        """A member was asked, since another may be lost. One that waits for it waits inside a
        step for longer than steps usually last, unless a member was known to compile in it."""
        self._note_usual(step_s)
        is_long = in_step_s > self._usual_patience_s()
        self.stuck = is_long and committed > self._compiles_in
        self._stuck_since = now - in_step_s

    def regroup(self) -> None:
        """A new group has not begun a step."""
        self._in_step_s = self._waiting_s = 0.0
        self._idle_since = None
        self._in_calls.clear()
        self.awaited = False
        self._compiles_in = -1
        self.stuck = False

    def quiet_since(self, now: float) -> float | None:
        """Since when the group has been standing still, if that is longer than steps usually last:
        since the begin of a step, or since a member waits for others."""
        begins = [self._stuck_since] if self.stuck else []
        if self.awaited and self._idle_since is not None:
            begins.append(self._idle_since)
        if (standing_s := max(self._in_step_s, self._waiting_s)) > 0.0:
            begins.append(self._observed_at - standing_s)
        since = min(begins, default=now)
        return since if now - since > self._usual_patience_s() else None

    @property
    def under_way(self) -> int:
        """The step that rank 0 was in, or came to next, when it last reported."""
        return self._under_way

    @property
    def usual_s(self) -> float:
        """The usual duration of a step; 0 while unknown."""
        return self._step_s

    def last_commit_at(self, now: float) -> float:
        """When the newest step was committed, as far as is known; since then there was none."""
        at = self._advanced_at if self._advanced_at is not None else now
        if self._in_step_s > 0.0 and self._under_way == self.committed:
            at = min(at, self._observed_at - self._in_step_s)
        return at

    def _slow_step_s(self, committed: int, over_at: float, usual_s: float) -> float:
        excused = self._first_step or self._under_way <= self._compiles_in
        if committed <= self._under_way or self._in_step_s == 0.0 or excused:
            return 0.0
        others_s = (committed - self._under_way - 1) * usual_s
        lasted_s = self._in_step_s + over_at - self._observed_at - others_s
        least_s = max(_SLOW_FLOOR_S, self._policy.factor * self._step_s, others_s)
        is_slow = lasted_s > least_s
        return lasted_s if is_slow else 0.0

    def _usual_patience_s(self) -> float:
        return max(_STUCK_FLOOR_S, _STUCK_FACTOR * self._step_s + _STUCK_MARGIN_S)

    def _note_usual(self, step_s: float) -> None:
        if step_s > 0.0:
            self._step_s = step_s

    def count_break(self) -> None:
        """The group broke although no member was lost."""
        self._breaks_at_step = (self.fruitless_breaks + 1, self.committed)

    @property
    def in_first_step(self) -> bool:
        """The group has committed no step, and is in its first."""
        return self._first_step and self._in_step_s > 0.0

    @property
    def fruitless_breaks(self) -> int:
        """How often in a row the group broke without a step committed since."""
        count, at_step = self._breaks_at_step
        return count if self.committed <= at_step else 0

    def step_after(self, notice_s: float, now: float) -> int:
        """The first count of committed steps expected to be reached later than `notice_s` ahead.

        An estimate: a wrong one costs a wait or a partly computed step, never correctness.
        """
        if self._step_s <= 0.0 or self._advanced_at is None:
            return self.committed + 1
        elapsed = min(now - self._advanced_at, 10 * self._step_s)
        ahead = math.ceil((elapsed + notice_s) / self._step_s)
        return self.committed + 1 + min(ahead, _MOST_STEPS_AHEAD)

    @property
    def stalled(self) -> bool:
        """The step under way lasts suspiciously long, or others wait for a member outside of it."""
        if self.awaited or 0.0 < self._policy.pause_s < self._waiting_s:
            return True
        if self._policy.floor_s <= 0.0:
            return False
        usual_s = max(self._policy.floor_s, self._policy.factor * self._step_s)
        if not self._first_step and self._under_way > self._compiles_in:
            return self._in_step_s > usual_s
        return 0.0 < self._policy.first_step_s < self._in_step_s and self._in_step_s > usual_s


class Hang:
    """The newest verdict, for the words with which its workers are replaced."""

    def __init__(self) -> None:
        self._odd: dict[WorkerId, Odd] = {}
        self._generation, self._at = 0, 0.0
        self.text = ""
        """The verdict in words; empty before the first."""

    def explained(self, generation: int, verdict: Diagnosis, now: float) -> None:
        """The members of this generation have told where they are."""
        self._odd = {odd.worker: odd for odd in verdict.odd}
        self._generation, self._at = generation, now
        self.text = verdict.text

    def of(self, worker: WorkerStatus, now: float) -> tuple[str, str]:
        """(in words, as "hung 20 s in train.py:47"; FILE:LINE of the script, where it waits for
        nobody) of one that has not come out of the group that hung; empty where not known."""
        odd = self._odd.get(worker.worker)
        if odd is None or worker.generation != self._generation:
            return "", ""
        if odd.frame is None:
            return odd.doing, ""
        lasts_s = odd.place_s + now - self._at
        return f"hung {lasts_s:.0f} s in {odd.frame.short_place}", odd.frame.place
