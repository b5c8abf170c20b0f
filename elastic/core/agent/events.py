"""What an agent is told, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.membership import Failure, FailureKind, Generation, WorkerId, WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The zygote is ready to fork, and has these workers already: those of an earlier agent."""

    workers: tuple[tuple[WorkerId, int], ...] = ()
    """Names and process ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpawned:
    """The worker's process runs."""

    worker: WorkerId
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNotSpawned:
    """The worker's process could not be made: the machine is short of something."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReported:
    """The worker's own status; its first one says that the script called elastic.init()."""

    status: WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCompiled:
    """The worker's script runs torch.compile, with `committed` steps; None: it does no longer."""

    worker: WorkerId
    committed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecovered:
    """The worker has committed its first step in this generation."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReportedFailure:
    """The script raised; the process is about to end."""

    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExited:
    """The process has ended. `signal` is 0 when it exited by itself."""

    worker: WorkerId
    exit_code: int
    signal: int = 0
    unseen: bool = False
    """The kernel says that it has ended; how is known to its parent, which has not said it."""
    out_of_memory: bool = False
    """The kernel has just killed a process of the node's for want of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFrozen:
    """The process is alive but has been silent for `silent_s` seconds."""

    worker: WorkerId
    silent_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationAnnounced:
    """The coordinator decided."""

    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceRequested:
    """The coordinator wants this worker ended and another one in its place."""

    worker: WorkerId
    kind: FailureKind
    message: str
    place: str = ""
    """FILE:LINE of the script at which it hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DismissRequested:
    """The job is complete: workers may end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnded:
    """Nothing is left to do here; end with this exit code."""

    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainRequested:
    """An operator wants this node left, or no longer: the coordinator sees to it, in its time."""

    called_off: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """No worker of this node is in the group any more, and none will be."""

    exit_code: int = 0
    """The exit code of an agent that has not asked for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strayed:
    """What is known here of the group is of another beginning of the job, which the store has
    lost, and the job goes on without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOff:
    """Neither the coordinator nor the store has been heard of for so long that the others may have
    given this node up for dead and gone on without its group."""

    silent_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveRequested:
    """First signal: leave at a step boundary after saving."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """Second signal: stop at once."""

    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerFired:
    """The instant asked for by SetTimer has come."""


Event = (
    Started
    | WorkerSpawned
    | WorkerNotSpawned
    | WorkerReported
    | WorkerCompiled
    | WorkerRecovered
    | WorkerReportedFailure
    | WorkerExited
    | WorkerFrozen
    | GenerationAnnounced
    | ReplaceRequested
    | DismissRequested
    | JobEnded
    | DrainRequested
    | Drained
    | CutOff
    | Strayed
    | LeaveRequested
    | StopRequested
    | TimerFired
)
