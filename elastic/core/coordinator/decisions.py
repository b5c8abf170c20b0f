"""The possible decisions about the group, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from elastic.core.membership import ChangeReason, Member, WorkerId


class WaitReason(enum.Enum):
    """Why the group stays as it is."""

    STEADY = 1
    GATHERING = 2
    BELOW_MINIMUM = 3
    ASSEMBLING = 4
    LISTENING_FOR_A_DEATH = 5
    COLLECTING_NEWCOMERS = 6
    OUT_OF_CONTACT = 7
    ANOTHER_GROUP_MAY_TRAIN = 8
    ENDING_THE_LAST_GROUP = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Change nothing. Decide again at `until`; None: at the next event."""

    reason: WaitReason
    until: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form a generation of `members`, in any order. No members: dissolve the group and wait."""

    members: tuple[Member, ...]
    reason: ChangeReason
    planned: bool = False
    left_out: frozenset[WorkerId] = field(default_factory=frozenset)
    """Members that are alive but did not arrive: their agents replace them."""
    unreachable: frozenset[WorkerId] = field(default_factory=frozenset)
    """Members that are alive and cannot reach all others. They keep their processes."""
    dropped: frozenset[WorkerId] = field(default_factory=frozenset)
    """Members that a planned change drops and that were lost before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """End the job: scripts have ended, and the remaining workers have nothing left to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """End the job: the group keeps breaking although no member dies. `detail`: what one reports."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TooFew:
    """End the job: too few workers have come for a group in time."""

    ready: int
    wanted: int
    within_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End the job, which is stopping, now."""

    in_time: bool
    """No worker with unsaved state is left. For a torchrun script: all its workers have ended."""


Decision = Wait | Form | Complete | GiveUp | TooFew
