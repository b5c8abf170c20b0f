"""Kinds of time, what workers report of it, and how numbers and names of documents are read."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

_LONGEST = 300  # most characters of a name that is read
_MOST = 2.0**53  # above it floats cannot count by one


class Kind(enum.Enum):
    """What a slot spent its time on."""

    PRODUCTIVE = "productive"
    """Committed steps, without the parts of them that the other kinds count."""
    RECOMPUTED = "recomputed"
    """Steps that were given up, and steps computed again after a checkpoint was loaded."""
    DATA_WAIT = "data_wait"
    """A step waited for its data loader."""
    SLOWER_RANK = "slower_rank"
    """A step waited for a rank that got its samples later, or began the step later."""
    DETECTION = "detection"
    """The time from the first sign of a loss to the decision."""
    DECISION = "decision"
    """The time from the decision until members begin to join: the decision is written and
    announced, and they reach the boundary."""
    JOIN = "join"
    STATE_TRANSFER = "state_transfer"
    FIRST_STEP = "first_step"
    """The time that the first step of a group takes beyond that of a usual step."""
    CHECKPOINT = "checkpoint_stall"
    SESSION_RUN = "session_run"
    """Calls of all members: the script's, and the comparison of replicas."""
    START_UP = "start_up"
    """Workers start and do not train yet, or their scripts have ended before the job has."""
    BELOW_MINIMUM = "below_minimum"
    SLOT_EMPTY = "slot_empty"
    """The node is lost, has left, is drained or is in quarantine."""
    HANG = "hang"
    """The group stood still until the hang was noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """What one worker has spent its time on, from its first group to its last commit or change of
    group. Every field only grows."""

    steps: int = 0
    """The number of committed steps."""
    steps_s: float = 0.0
    """The time from commit to commit. A group's first step adds no more than a usual step takes."""
    data_s: float = 0.0
    """The part of `steps_s` that waited for the data loader."""
    calls_s: float = 0.0
    """The part of `steps_s` inside `session.run`."""
    saves_s: float = 0.0
    """The part of `steps_s` in which saves held up training."""
    own_s: float = 0.0
    """The part of `steps_s` from each commit until the samples of the next step arrived."""
    first_steps_s: float = 0.0
    """The time that the first steps of groups took beyond that of a usual step."""
    given_up_s: float = 0.0
    """The time in steps and calls that were lost with their group."""
    regroup_s: float = 0.0
    """The time from leaving a group until the next group could train."""
    join_s: float = 0.0
    """The part of `regroup_s` that built the group."""
    sync_s: float = 0.0
    """The part of `regroup_s` that brought the group to one state."""

    @property
    def total_s(self) -> float:
        return self.steps_s + self.first_steps_s + self.given_up_s + self.regroup_s

    def since(self, earlier: TimeSpent) -> TimeSpent:
        """The time spent since `earlier`, or all of it if `earlier` is from another process."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        more = [mine - theirs for mine, theirs in pairs]
        return _spent(more) if min(more) >= 0 else self


_SPENT = tuple(f.name for f in fields(TimeSpent))


def _spent(values: Sequence[Any]) -> TimeSpent:
    return TimeSpent(**dict(zip(_SPENT, values, strict=True)))


def read_number(value: Any) -> float:
    """Check a number of seconds or a count: finite, at least 0. Raises ValueError or TypeError."""
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if isinstance(value, bool) or not (math.isfinite(number) and 0.0 <= number <= _MOST):
        raise ValueError(f"{value!r} is not a valid number")
    return number


def read_name(value: Any) -> str:
    """Check the name of a node or worker, or the text of a reason. Raises ValueError."""
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError(f"{value!r} is not a valid name")
    value.encode()
    return value


def read_spent(values: Iterable[Any]) -> TimeSpent:
    """Read a TimeSpent that `astuple` turned into a tuple. Raises ValueError or TypeError."""
    numbers = [read_number(value) for value in values]
    return _spent((int(numbers[0]), *numbers[1:]))


def seconds_of(kinds: Mapping[Kind, float]) -> dict[str, float]:
    return {kind.value: round(seconds, 6) for kind, seconds in kinds.items() if seconds > 0.0}


def read_seconds(document: Mapping[str, Any]) -> dict[Kind, float]:
    known = {kind.value for kind in Kind}
    return {Kind(name): read_number(s) for name, s in document.items() if name in known}
