"""Follows the job's progress: committed steps, the usual duration of a step, stalls, and hangs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.core.coordinator.events import ProgressReported
from elastic.core.diagnosis import Diagnosis, SlowOrHungRank
from elastic.core.membership import WorkerId, WorkerStatus

# A step that lasts longer than these allow, compared with the longest recent one, may wait for a
# lost member. A busy machine holds up single steps for a second; and a node that is cut off is only
# noticed after 1 s, so a lower floor would save no time.
_STUCK_FLOOR_S, _STUCK_FACTOR, _STUCK_MARGIN_S = 1.0, 1.25, 0.3
_SLOW_FLOOR_S = 1.0  # shorter delays are the scheduler's noise
_LAGS_FACTOR, _LAGS_FLOOR_S = 3.0, 1.0  # beyond these, members are asked where they are in a step
_LAGS_EVERY_S = 30.0
_ANSWER_HOLDS_S = 3.0
_MOST_STEPS_AHEAD = 20  # more would only delay: steps this short cost little if news comes late


@dataclass(frozen=True, kw_only=True, slots=True)
class StallPolicy:
    """A step that lasts longer than max(floor, factor x usual step) is stalled."""

    floor_s: float = 60.0
    """0 turns the watch off."""
    factor: float = 10.0
    first_step_s: float = 600.0
    """The floor for the first step of a group, and for a step in which a member compiles. 0: such
    steps are never stalled."""
    pause_s: float = 600.0
    """How long members wait for one that is between two steps or in `session.run`. 0: for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _InCall:
    """The answer of a member that is inside `session.run`."""

    at: float
    collectives: int
    """How many collectives it has begun."""
    quiet_s: float
    """For how long it has begun no other."""


class ProgressWatch:
    """Follows the reports of rank 0, the answers of members, and whether any member compiles."""

    def __init__(self, policy: StallPolicy) -> None:
        self._policy = policy
        self._step_s = self._longest_s = 0.0
        self._in_step_s = 0.0
        self._steps_total_s = 0.0
        self._observed_at = self._stuck_since = 0.0
        self._under_way = 0
        """The step to which `_in_step_s` belongs, as the number of steps committed before it."""
        self._first_step = False
        self._compiles_in = -1
        """The last step in which a member was known to compile."""
        self._idle_since: float | None = None
        """Since when rank 0 has neither been in a step nor waited for others. It may be in
        `session.run`."""
        self._waiting_s = 0.0
        self._in_calls: dict[WorkerId, _InCall] = {}
        self._lag_told: tuple[int, float] | None = None
        """The last step for which `lags_s` returned a duration, and when."""
        self._advanced_at: float | None = None
        self._breaks_at_step: tuple[int, int] = (0, -1)
        self.committed = 0
        self.stuck = False
        """The member that was asked last has been in its step for longer than usual."""
        self.members_wait = False
        """Members that were asked have waited for another one for longer than `pause_s`."""

    def observe(
        self,
        committed: int,
        now: float,
        *,
        step_s: float = 0.0,
        longest_s: float = 0.0,
        in_step_s: float = 0.0,
        first_step: bool = False,
        waiting_s: float = 0.0,
        steps_total_s: float = 0.0,
        joining: bool = False,
    ) -> float:
        """Take a report of rank 0 of the present group. Its count is right even if it is lower than
        before: the job may have gone back to a checkpoint.

        step_s: the usual duration of a step. longest_s: the longest of the recent ones. in_step_s:
        how long the step under way has lasted; 0 between steps, where a script may evaluate for as
        long as it likes. first_step: this is the first step of the group. waiting_s: how long rank
        0 has waited for others at a call. steps_total_s: the durations of all steps that it has
        committed; 0: not known. joining: rank 0 has not come to the group's state yet, so
        its count is not the job's.

        Returns how long the step of the previous report has lasted, if that is suspiciously long
        and the step is over now; else 0. No reports come while an agent or its stream is away: all
        other steps since then count as usual ones, and among many a single slow one is not found.
        """
        if in_step_s > 0.0 or waiting_s > 0.0:
            self._idle_since = None
        elif self._idle_since is None or committed != self._under_way:
            self._idle_since = now
        self._waiting_s = waiting_s
        within_s = steps_total_s - self._steps_total_s if steps_total_s > 0.0 else math.inf
        slow_s = self._slow_step_s(committed, now - in_step_s, step_s or self._step_s, within_s)
        self._steps_total_s = steps_total_s
        self._in_step_s, self._under_way, self._first_step = in_step_s, committed, first_step
        self._observed_at = now
        self._note_usual(step_s, longest_s)
        if not joining:
            self.goes_on_from(committed)
            self.advance(committed, now)
        return slow_s

    def lags_s(self, now: float) -> float:
        """How long the step under way has lasted, if that is more than three usual steps and 1 s,
        and it does not count as stalled; else 0. Returns a duration at most once for each step, and
        at most every 30 s."""
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
        """A new group has agreed on a state: the job may have gone back for it."""
        self.committed = min(committed, self.committed)

    def advance(self, committed: int, now: float) -> None:
        """Some member has committed this many steps. A lower count changes nothing."""
        if committed > self.committed or self._advanced_at is None:
            self.committed = max(committed, self.committed)
            self._advanced_at = now

    def compiles(self, committed: int) -> None:
        """A member runs torch.compile in the step after `committed`, and the others wait in it. The
        step stays excused after the compilation, until it ends."""
        self._compiles_in = max(committed, self._compiles_in)

    def should_probe(self, now: float) -> bool:
        """True if rank 0 has been idle for longer than `pause_s`: members should be asked whether
        they wait for it."""
        patience_s = self._policy.pause_s
        return (
            patience_s > 0.0
            and self._idle_since is not None
            and (now - self._idle_since > patience_s)
        )

    def answered(self, answer: ProgressReported, now: float) -> None:
        """Take the answer of a member of the present group: does it wait for others?

        It may wait in a step, or for others to come to a call, or in a collective of a call that
        others have not reached.
        """
        self.probed(
            answer.committed,
            now,
            step_s=answer.step_s,
            longest_s=answer.longest_step_s,
            in_step_s=answer.in_step_s,
        )
        patience_s = self._policy.pause_s
        if not self.should_probe(now) or answer.committed <= self._compiles_in:
            return
        if max(answer.in_step_s, answer.waiting_s) > patience_s:
            self.members_wait = True
        if answer.collectives:
            self._in_calls[answer.worker] = _InCall(
                at=now, collectives=answer.collectives, quiet_s=answer.quiet_s
            )
        known = [c for c in self._in_calls.values() if now - c.at < _ANSWER_HOLDS_S]
        furthest = max((c.collectives for c in known), default=0)
        waiting = [c.quiet_s for c in known if c.collectives == furthest]
        if len(waiting) < len(known) and min(waiting) > patience_s:
            self.members_wait = True

    def probed(
        self, committed: int, now: float, *, step_s: float, longest_s: float = 0.0, in_step_s: float
    ) -> None:
        """Take the answer of a member that was asked because another one may be lost. If it waits
        for that one, it is in a step for longer than usual, in which no member compiles."""
        self._note_usual(step_s, longest_s)
        is_long = in_step_s > self._usual_patience_s()
        self.stuck = is_long and committed > self._compiles_in
        self._stuck_since = now - in_step_s

    def regroup(self) -> None:
        self._in_step_s = self._waiting_s = 0.0
        self._idle_since = None
        self._in_calls.clear()
        self.members_wait = False
        self._compiles_in = -1
        self.stuck = False

    def quiet_since(self, now: float) -> float | None:
        """Since when the group has stood still, if that is longer than a step usually lasts: since
        a step began, or since a member waits for others. Else None."""
        begins = [self._stuck_since] if self.stuck else []
        if self.members_wait and self._idle_since is not None:
            begins.append(self._idle_since)
        if (standing_s := max(self._in_step_s, self._waiting_s)) > 0.0:
            begins.append(self._observed_at - standing_s)
        since = min(begins, default=now)
        return since if now - since > self._usual_patience_s() else None

    @property
    def under_way(self) -> int:
        """The step that rank 0 was in, or was about to begin, when it last reported."""
        return self._under_way

    @property
    def usual_s(self) -> float:
        """The usual duration of a step; 0 while unknown."""
        return self._step_s

    def last_commit_at(self, now: float) -> float:
        """When the newest step was committed, as far as is known; `now` if no step is known."""
        at = self._advanced_at if self._advanced_at is not None else now
        if self._in_step_s > 0.0 and self._under_way == self.committed:
            at = min(at, self._observed_at - self._in_step_s)
        return at

    def _slow_step_s(
        self, committed: int, over_at: float, usual_s: float, within_s: float
    ) -> float:
        """within_s: the time that all steps since the previous report took by rank 0's own clock.
        Reports wait while this process or the agent's is stopped, and then come all at once."""
        excused = self._first_step or self._under_way <= self._compiles_in
        if committed <= self._under_way or self._in_step_s == 0.0 or excused:
            return 0.0
        usual_s = max(usual_s, self._step_s)
        others_s = (committed - self._under_way - 1) * usual_s
        lasted_s = min(self._in_step_s + over_at - self._observed_at, within_s) - others_s
        least_s = max(_SLOW_FLOOR_S, self._policy.factor * usual_s, others_s)
        is_slow = usual_s > 0.0 and lasted_s > least_s
        return lasted_s if is_slow else 0.0

    def _usual_patience_s(self) -> float:
        longest_s = max(self._step_s, self._longest_s)
        return max(_STUCK_FLOOR_S, _STUCK_FACTOR * longest_s + _STUCK_MARGIN_S)

    def _note_usual(self, step_s: float, longest_s: float) -> None:
        if step_s > 0.0:
            self._step_s, self._longest_s = step_s, longest_s

    def count_break(self) -> None:
        self._breaks_at_step = (self.fruitless_breaks + 1, self.committed)

    @property
    def in_first_step(self) -> bool:
        return self._first_step and self._in_step_s > 0.0

    @property
    def fruitless_breaks(self) -> int:
        """How often in a row the group broke without a step committed in between."""
        count, at_step = self._breaks_at_step
        return count if self.committed <= at_step else 0

    def step_after(self, notice_s: float, now: float) -> int:
        """The first count of committed steps that should be reached later than `notice_s` from now.
        A wrong estimate costs a wait or a partly computed step, never correctness."""
        if self._step_s <= 0.0 or self._advanced_at is None:
            return self.committed + 1
        elapsed = min(now - self._advanced_at, 10 * self._step_s)
        ahead = math.ceil((elapsed + notice_s) / self._step_s)
        return self.committed + 1 + min(ahead, _MOST_STEPS_AHEAD)

    @property
    def stalled(self) -> bool:
        """The step under way lasts too long, or members wait too long for one outside of it."""
        if self.members_wait or 0.0 < self._policy.pause_s < self._waiting_s:
            return True
        if self._policy.floor_s <= 0.0:
            return False
        usual_s = max(self._policy.floor_s, self._policy.factor * self._step_s)
        if not self._first_step and self._under_way > self._compiles_in:
            return self._in_step_s > usual_s
        return 0.0 < self._policy.first_step_s < self._in_step_s and self._in_step_s > usual_s


class Hang:
    """The newest verdict about a hang, which gives the messages for the workers to replace."""

    def __init__(self) -> None:
        self._odd: dict[WorkerId, SlowOrHungRank] = {}
        self._generation, self._at = 0, 0.0
        self.text = ""
        """The verdict in words; empty before the first."""

    def explained(self, generation: int, verdict: Diagnosis, now: float) -> None:
        self._odd = {odd.worker: odd for odd in verdict.odd}
        self._generation, self._at = generation, now
        self.text = verdict.text

    def of(self, worker: WorkerStatus, now: float) -> tuple[str, str]:
        """What a worker that is still in the hung group does: (in words, such as "hung 20 s in
        train.py:47", and FILE:LINE of the script if it waits for no other worker). Empty strings if
        unknown."""
        odd = self._odd.get(worker.worker)
        if odd is None or worker.generation != self._generation:
            return "", ""
        if odd.frame is None:
            return odd.doing, ""
        lasts_s = odd.place_s + now - self._at
        return f"hung {lasts_s:.0f} s in {odd.frame.short_place}", odd.frame.place
