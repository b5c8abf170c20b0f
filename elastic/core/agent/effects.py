"""The effects of the agent's machine: what the daemon should do, in the imperative."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elastic.core.membership import Failure, Generation, WorkerId, WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnWorker:
    """Fork a worker process, which runs the script until it waits for a slot."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignSlot:
    """Let the worker go on as local rank `slot`."""

    worker: WorkerId
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardGeneration:
    """Tell a worker about the generation."""

    worker: WorkerId
    generation: Generation


class How(enum.Enum):
    """How a process is ended."""

    KILL = 1
    DUMP_AND_KILL = 2  # writes its stacks to its log first
    TERMINATE = 3  # SIGTERM to a script written for torchrun


@dataclass(frozen=True, kw_only=True, slots=True)
class EndWorker:
    """End the worker's process and all processes that it has started."""

    worker: WorkerId
    how: How = How.KILL


@dataclass(frozen=True, kw_only=True, slots=True)
class DismissWorker:
    """Let a worker exit whose script has ended."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportNode:
    """Send the node's whole view of its workers to the coordinator."""

    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFailure:
    """Send a worker's failure to the coordinator."""

    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class AskToStop:
    """Ask the coordinator to save and stop the job."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AskToLeave:
    """Ask the coordinator to let this node's workers leave the group; the job goes on."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TellLeaveTimedOut:
    """Tell the coordinator and the user that this node reached no step boundary at which to leave,
    and ends its workers now."""

    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Send TimerFired at this instant. It replaces the previous timer; None: no timer."""

    at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitAgent:
    """End the agent: no process is left, or the last ones do not end in time."""

    exit_code: int


Effect = (
    SpawnWorker
    | AssignSlot
    | ForwardGeneration
    | EndWorker
    | DismissWorker
    | ReportNode
    | ReportFailure
    | AskToStop
    | AskToLeave
    | TellLeaveTimedOut
    | SetTimer
    | ExitAgent
)
