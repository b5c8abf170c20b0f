"""The data types of membership: workers and their reports, members, generations, failures."""

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
    """All that the control plane knows of one worker. Each report replaces the one before."""

    worker: WorkerId
    phase: WorkerPhase = WorkerPhase.STARTING
    slot: int | None = None
    """Local rank on its node; None for a spare."""
    generation: int = 0
    """The generation that it is in, is joining, or left last. 0: none."""
    acknowledged: int = 0
    """The newest generation that its link's thread has acknowledged, whatever its script does."""
    broken: bool = False
    """The group of `generation` was lost."""
    detail: str = ""
    """Why the group was lost, in words."""
    committed: int = 0
    """The number of committed steps."""
    endpoint: str = ""
    """host:port of the store that it hosts."""
    pid: int = 0
    in_run: bool = False
    """Its script is inside `session.run`, between two steps."""
    has_state: bool = False
    """It holds the job's state: it has been in a group, and its state is whole."""
    trained_in: int = 0
    """The newest generation for training whose members agreed with it on one state. 0: none, or
    not known."""
    compiling: int | None = None
    """The number of committed steps at which its script runs torch.compile, which may take minutes.
    None: it does not compile, as far as its agent knows."""
    queues: bool = False
    """Its groups' operations are queued on a device: one that is aborted ends without an error, and
    leaves garbage here and at peers that are in the same operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A worker that takes part in a generation. Its rank is its index in `Generation.members`."""

    worker: WorkerId
    node: NodeId
    slot: int
    endpoint: str
    counts_from: int = 0
    """Its state counts only if it is of this generation's group or a later one. Else others have
    aborted its group while it was not known to be frozen, so its last step may be garbage."""


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
    """What the members of a generation do."""

    TRAIN = 1
    SAVE_AND_LEAVE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One decision about which workers train together. Without members, all workers wait."""

    number: int
    incarnation: str
    members: tuple[Member, ...]
    reason: ChangeReason
    leave_after: int | None = None
    """For a planned change: leave the previous group when this many steps are committed. None:
    leave it at once."""
    provisional: bool = False
    """Not all whom this concerns have acknowledged it. A settled form with the same number follows.
    If the change is planned, members of the previous group wait at the boundary `leave_after`,
    which may be later in the settled form. In that form or one after it, `leave_after` is None if
    the previous group can no longer reach the boundary. If it is not planned, see `freezes`."""
    frozen: tuple[WorkerId, ...] = ()
    """Without members: the workers that freeze their groups before this is settled."""
    queues: bool = False
    """The operations of the job's groups are queued on a device: unplanned changes freeze them."""
    purpose: Purpose = Purpose.TRAIN
    save_first: bool = False
    """Save a checkpoint at the first boundary, because an earlier save was abandoned."""
    begun: bool = False
    """A step of the job was committed before, as far as is known: without a checkpoint the members
    do not begin with the initial state."""
    restart_count: int = 0
    """For a script written for torchrun: how often all workers were restarted before."""
    max_restarts: int = 0
    """For such a script: how often a failed worker may restart all workers within the window."""
    worker_ids: frozenset[WorkerId] = field(init=False, repr=False, compare=False)
    """The members' ids, kept because every event needs them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "worker_ids", frozenset(m.worker for m in self.members))

    def workers_on(self, node: NodeId) -> frozenset[WorkerId]:
        return frozenset(m.worker for m in self.members if m.node == node)

    def is_news_after(self, known: Generation | None) -> bool:
        """Whether this is a later decision than `known`, the newest one, or a later form of it."""
        if known is None or self.number > known.number:
            return True
        if self.number < known.number or self.provisional:
            return False
        return known.provisional or (known.leave_after is not None and self.leave_after is None)

    @property
    def freezes(self) -> bool:
        """Workers whose operations queue freeze their groups now, and take no further result from
        them. They abort them once the settled form says that nobody takes garbage any more."""
        return self.provisional and self.leave_after is None

    def is_due(self, committed: int) -> bool:
        """Whether to leave the previous group now: the boundary is settled and reached, or there is
        none to wait for."""
        if self.provisional:
            return False
        return self.leave_after is None or committed >= self.leave_after

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def store_endpoint(self) -> str:
        """host:port of the store at which this generation's members meet: rank 0 hosts it."""
        return self.members[0].endpoint

    @property
    def store_port(self) -> int:
        return int(self.store_endpoint.rpartition(":")[2])

    @property
    def store_prefix(self) -> str:
        """A key prefix that no other generation uses, not even one of an earlier incarnation."""
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
    """The exit code or the signal number."""
    signature: str = ""
    """Equal for equal faults: for an exception, its type and the script's innermost line."""
    message: str = ""
    traceback: str = ""
    """The traceback of a Python exception; empty for any other end."""
    log_tail: str = ""
    """The last lines of its log, if there is no traceback."""
    retryable: bool = True
    """False: an error in the configuration, which no restart can fix."""
    state_lost: bool = False
    """No worker holds the job's state. This ends the job, whichever worker reports it."""
    log: str = ""
    place: str = ""
    """FILE:LINE of the script where it hung. Empty if it waited for another worker."""


def signal_name(number: int) -> str:
    """The name and number of a signal: "SIGKILL (signal 9)"."""
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} (signal {number})"
    return f"signal {number}"


def by_id(statuses: Iterable[WorkerStatus]) -> dict[WorkerId, WorkerStatus]:
    return {s.worker: s for s in statuses}
