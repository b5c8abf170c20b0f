"""The events that the agent's machine handles, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.membership import Failure, FailureKind, Generation, WorkerId, WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchStarted:
    """The agent looks for an earlier agent's zygote, and asks it which workers still run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingFound:
    """No earlier agent's zygote runs, so no worker runs either. A new zygote is being started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The zygote is ready to fork. `workers`: workers of an earlier agent that still run."""

    workers: tuple[tuple[WorkerId, int], ...] = ()
    """Names and process ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpawned:
    """The worker's process runs."""

    worker: WorkerId
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerNotSpawned:
    """The worker's process could not be forked: the machine lacks some resource."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReported:
    """The worker has reported its status. Its first report means that elastic.init() was called."""

    status: WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCompiled:
    """The worker's script runs torch.compile after `committed` steps; None: it no longer does."""

    worker: WorkerId
    committed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecovered:
    """The worker has committed its first step in this generation."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReportedFailure:
    """The script has raised an exception; the process is about to end."""

    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExited:
    """The process has ended, or is about to. `signal` is 0 when it exited by itself."""

    worker: WorkerId
    exit_code: int
    signal: int = 0
    unseen: bool = False
    """The kernel says that the process has ended. Only its parent knows how, and does not say."""
    out_of_memory: bool = False
    """The kernel has just killed a process of the node because memory was short."""
    with_zygote: bool = False
    """The kernel has ended it because the zygote, its parent, had ended."""
    gone: bool = True
    """False: it was killed, but the kernel still frees its memory, and it may hold a device. The
    event comes again when that is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFrozen:
    """The worker's process is alive but has been silent for `silent_s` seconds."""

    worker: WorkerId
    silent_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationAnnounced:
    """The coordinator has announced a generation, or another form of it."""

    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceRequested:
    """The coordinator wants this worker to be ended and replaced."""

    worker: WorkerId
    kind: FailureKind
    message: str
    place: str = ""
    """FILE:LINE of the script at which the worker hangs; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DismissRequested:
    """The job is complete: workers may exit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnded:
    """The job has ended: the agent should exit with this code."""

    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainRequested:
    """An operator wants the job to leave this node, or has called that off. The coordinator lets
    the workers leave; the agent ends them after `leave_timeout_s`."""

    called_off: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """No worker of this node is in the group any more, and none will join it again."""

    exit_code: int = 0
    """The exit code of an agent that did not ask to leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IncarnationSuperseded:
    """The group of this node belongs to an incarnation that the store has lost: the job has begun
    again without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOff:
    """Neither the coordinator nor the store has answered for so long that the others may have taken
    this node for dead and gone on without its group."""

    silent_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveRequested:
    """The agent got its first signal: leave at a step boundary, after saving if the job stops."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """The agent got its second signal: stop at once."""

    exit_code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerFired:
    """The instant given by SetTimer has come."""


Event = (
    SearchStarted
    | NothingFound
    | Started
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
    | IncarnationSuperseded
    | LeaveRequested
    | StopRequested
    | TimerFired
)
