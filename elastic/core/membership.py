"""The nouns of membership: workers and what they report, members, generations."""

from __future__ import annotations

import contextlib
import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

WorkerId = str
NodeId = str


class WorkerPhase(enum.Enum):
    """Where a worker is between its fork and its exit."""

    STARTING = 1  # runs the script, has not called elastic.init()
    SPARE = 2  # waits inside elastic.init() for a slot
    PREPARING = 3  # has a slot, builds its model
    READY = 4  # waits for a generation
    JOINING = 5
    TRAINING = 6
    FINISHED = 7  # its script has ended; waits to be dismissed


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """All that the control plane knows of one worker; each report replaces the one before."""

    worker: WorkerId
    phase: WorkerPhase = WorkerPhase.STARTING
    slot: int | None = None
    """Local rank on its node; None for a spare."""
    generation: int = 0
    """The generation it is in, is joining, or left last; 0 for none."""
    acknowledged: int = 0
    """The newest generation it has acknowledged, whatever its script is doing."""
    broken: bool = False
    """The group of that generation broke under it."""
    detail: str = ""
    committed: int = 0
    """Committed steps."""
    endpoint: str = ""
    """host:port of the store it hosts."""
    pid: int = 0
    in_run: bool = False
    """Its script is inside `session.run`, between two steps."""
    has_state: bool = False
    """It holds the job's state: it has been in a group at least once."""
    trained_in: int = 0
    """The newest generation with whose members it came to one state, to train on; 0: none, or not
    known."""
    compiling: int | None = None
    """Its script runs torch.compile, which may take minutes, with so many steps committed; None:
    it does not, as far as its agent knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A worker that takes part in a generation; its rank is its index there."""

    worker: WorkerId
    node: NodeId
    slot: int
    endpoint: str


class ChangeReason(enum.Enum):
    """Why a generation was formed."""

    STARTED = 1
    MEMBER_LOST = 2
    MEMBER_JOINED = 3
    GROUP_BROKEN = 4
    JOIN_TIMED_OUT = 5
    BELOW_MINIMUM = 6
    STALLED = 7
    STOPPING = 8
    MEMBER_LEAVING = 9


class Purpose(enum.Enum):
    """What the members of a generation are to do."""

    TRAIN = 1
    SAVE_AND_LEAVE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One decision about which workers train together. Without members: all of them wait."""

    number: int
    incarnation: str
    members: tuple[Member, ...]
    reason: ChangeReason
    leave_after: int | None = None
    """Planned: leave the previous group once this many steps are committed. None: at once."""
    provisional: bool = False
    """Planned, and not yet acknowledged by all members that are to leave: wait there. The settled
    form follows under the same number; its `leave_after` may be later. It is None there, or in
    another form after that, if nobody can come to such a boundary any more."""
    purpose: Purpose = Purpose.TRAIN
    save_first: bool = False
    """Save a checkpoint at the first boundary, because an earlier save was abandoned."""
    restart_count: int = 0
    """For a script written for torchrun: how often all workers were restarted before."""
    max_restarts: int = 0
    """How often they may be because a worker failed, within the window."""
    worker_ids: frozenset[WorkerId] = field(init=False, repr=False, compare=False)
    """The members' ids: asked for at every event."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "worker_ids", frozenset(m.worker for m in self.members))

    def workers_on(self, node: NodeId) -> frozenset[WorkerId]:
        """The members' ids on one node."""
        return frozenset(m.worker for m in self.members if m.node == node)

    def is_news_after(self, known: Generation | None) -> bool:
        """A later decision than the newest `known`, or a later form of it."""
        if known is None or self.number > known.number:
            return True
        if self.number < known.number or self.provisional:
            return False
        return known.provisional or (known.leave_after is not None and self.leave_after is None)

    def is_due(self, committed: int) -> bool:
        """It is known at which step boundary the group before is left, and that is reached."""
        if self.provisional:
            return False
        return self.leave_after is None or committed >= self.leave_after

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def store_endpoint(self) -> str:
        """host:port of the store on which this generation's group assembles."""
        return self.members[0].endpoint

    @property
    def store_prefix(self) -> str:
        """Key prefix never used by another generation, also of an earlier incarnation."""
        return f"{self.incarnation}/{self.number}"

    def rank_of(self, worker: WorkerId) -> int | None:
        """The worker's rank, or None if it is not a member."""
        for rank, member in enumerate(self.members):
            if member.worker == worker:
                return rank
        return None


class FailureKind(enum.Enum):
    """How a worker failed."""

    SIGNAL = 1
    EXCEPTION = 2
    EXIT_CODE = 3
    START_TIMEOUT = 4
    LEFT_OUT = 5
    SLOW = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One worker's unplanned end."""

    worker: WorkerId
    kind: FailureKind
    code: int = 0
    """Exit code, or signal number."""
    signature: str = ""
    """Equal for the same fault: exception type and innermost line of the script."""
    message: str = ""
    traceback: str = ""
    """The traceback of a Python exception; empty for any other end."""
    log_tail: str = ""
    """The last lines of its log, where there is no traceback."""
    retryable: bool = True
    """False: a fault of configuration that no restart can cure."""
    state_lost: bool = False
    """Nobody holds the job's state: whichever worker has found that out, it ends the job."""
    log: str = ""
    place: str = ""
    """FILE:LINE of the script at which it hung, where it waited for no other worker."""
    kernel: str = ""
    """What the kernel's log says of its end, where that can be read."""


def signal_name(number: int) -> str:
    """The signal in words: "SIGKILL (signal 9)"."""
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} (signal {number})"
    return f"signal {number}"


def by_id(statuses: Iterable[WorkerStatus]) -> dict[WorkerId, WorkerStatus]:
    """Index reports by worker."""
    return {s.worker: s for s in statuses}
