"""What a worker's participation wants done: its driver carries these out.

"Raises GroupLost" means that the driver throws it into the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from elastic.core.data_order import DataPosition, SampleRange, advance
from elastic.core.learning_rate import Ramp
from elastic.core.membership import Generation
from elastic.core.recovery import Declaration, Mark
from elastic.errors import GroupLost

Call: TypeAlias = Any
"""What is called: the driver's own."""
Ramps: TypeAlias = Mapping[str, Ramp]
NO_RAMPS: Ramps = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the job is: what the session itself adds to the tracked state.

    committed: steps of the job. committed_in: the generation that committed the last one.
    loop: the script's loop over `session.steps` that it was in, from 0. positions: how far each
    loader is, by the order in which the script first used them. ramps: of the learning rates, by
    the number of the scaled optimizer.
    """

    committed: int = 0
    committed_in: int = 0
    loop: int = 0
    positions: tuple[DataPosition, ...] = ()
    ramps: Mapping[str, Ramp] = field(default_factory=lambda: NO_RAMPS)

    def position(self, loader: int) -> DataPosition:
        """How far the loader with this number is."""
        return self.positions[loader] if loader < len(self.positions) else DataPosition()

    def after(
        self, samples: SampleRange, *, loader: int, loop: int, generation: int, ramps: Ramps
    ) -> Progress:
        """After one more step, which consumed `samples` of `loader`."""
        positions = list(self.positions)
        while len(positions) <= loader:
            positions.append(DataPosition())
        positions[loader] = advance(positions[loader], samples)
        return Progress(
            committed=self.committed + 1,
            committed_in=generation,
            loop=loop,
            positions=tuple(positions),
            ramps=ramps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A place in a group: the result of `Join`."""

    generation: Generation
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """Wait for a generation to join, and build its group; meanwhile take the digests that
    `Declare` needs. Returns a Seat; raises GroupLost.

    held: this member holds a whole state. at_begin: it is at the begin mark.
    """

    held: bool
    at_begin: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Declare:
    """Give `mine` to every member, with the digests filled in. Returns all declarations, by rank;
    raises GroupLost."""

    mine: Declaration


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainMismatch:
    """Rank `reference` tells the `odd` ranks what it tracks; these raise ModelMismatch."""

    reference: int
    odd: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DropState:
    """The state of another member is about to overwrite this one's, or a block could not be undone:
    no longer count on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send the tracked state as of `mark`, and `progress`, to `rank`. Raises GroupLost."""

    rank: int
    progress: Progress
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Receive:
    """Take over what `rank` sends; returns its progress. A state of a later loop than `loop` is
    held back until `TakeHeld`. Raises GroupLost."""

    rank: int
    loop: int
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Load the newest checkpoint; returns its progress, None if there is none. A state of a later
    loop than `loop` is held back until `TakeHeld`."""

    loop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeHeld:
    """The script has come to the loop of the state that was held back: put it in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellDifference:
    """Members of one step held different states; `ranks` take over that of `right`."""

    ranks: tuple[int, ...]
    right: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """The members have one state: wrap the models, deal the data."""

    seat: Seat


@dataclass(frozen=True, kw_only=True, slots=True)
class TearDown:
    """The group is gone, or about to be: unwrap the models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TellJoined:
    """Report that this member trains in the group of its seat."""

    committed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """Everything is set up: report how the group was formed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """Close the group in good order and say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """Close the lost group at once, so that its other members are freed too, and say so."""

    error: GroupLost
    held: bool
    """The state is whole, and so worth being asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitSettlement:
    """Wait until a planned change is settled. Returns False after `timeout_s`."""

    committed: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitSuccessor:
    """Wait until a generation that follows this group's is announced, or `timeout_s` is
    over."""

    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBack:
    """Undo what a block has changed. Returns whether the state is that of its begin again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepForRetry:
    """The block does not count, yet the script runs what stands below it: remember the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutBackForRetry:
    """The same step is about to be handed out again: undo what the script did since then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareReplicas:
    """Compare the parameters of all members; raises GroupLost, or an error that names those that
    differ although nothing was ever lost between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Begin to save this member's share, in the background."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveAndWait:
    """Save, and wait until the checkpoint is settled; raises GroupLost if the group is superseded
    meanwhile."""

    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveJob:
    """The job is to be left here: raises what unwinds the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetForCall:
    """Wait until every member has come to call `number` since the last commit, and compare what
    they call. Raises GroupLost, or an error that names both if they differ."""

    committed: int
    number: int
    call: Call


@dataclass(frozen=True, kw_only=True, slots=True)
class Perform:
    """Make the call. Returns its result; raises GroupLost."""

    call: Call


Action: TypeAlias = (
    Join
    | Declare
    | ExplainMismatch
    | DropState
    | Send
    | Receive
    | Restore
    | TakeHeld
    | TellDifference
    | SetUp
    | TearDown
    | TellJoined
    | Entered
    | Leave
    | Break
    | AwaitSettlement
    | AwaitSuccessor
    | PutBack
    | KeepForRetry
    | PutBackForRetry
    | CompareReplicas
    | Save
    | SaveAndWait
    | LeaveJob
    | MeetForCall
    | Perform
)
