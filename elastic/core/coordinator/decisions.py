"""What can be decided about the group, as data."""

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
    """Change nothing; look again at `until` (None: at the next report)."""

    reason: WaitReason
    until: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Form a generation of `members` (in no order); empty: dissolve the group and wait."""

    members: tuple[Member, ...]
    reason: ChangeReason
    planned: bool = False
    left_out: frozenset[WorkerId] = field(default_factory=frozenset)
    """Alive members that did not arrive: to be replaced by their agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """Every member that is left has ended its script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """The group keeps breaking although nobody dies: `detail` is what a member reported."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End the job, which stops, now."""

    in_time: bool
    """No worker is left that holds an unsaved state."""


Decision = Wait | Form | Complete | GiveUp
