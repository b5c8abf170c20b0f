"""What an agent wants done, in the imperative."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from elastic.core.membership import Failure, Generation, WorkerId, WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnWorker:
    """Fork a worker process; it runs the script until it waits for a slot."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignSlot:
    """Let the worker go on as local rank `slot`."""

    worker: WorkerId
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardGeneration:
    """Tell a worker of the generation."""

    worker: WorkerId
    generation: Generation


class How(enum.Enum):
    """How firmly a process is ended."""

    KILL = 1
    DUMP_AND_KILL = 2  # its stacks go to its log first
    TERMINATE = 3  # SIGTERM to a script that was written for torchrun


@dataclass(frozen=True, kw_only=True, slots=True)
class EndWorker:
    """End the worker's process and whatever it has started."""

    worker: WorkerId
    how: How = How.KILL


@dataclass(frozen=True, kw_only=True, slots=True)
class DismissWorker:
    """Let a worker whose script has ended exit."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportNode:
    """Send the whole view to the coordinator."""

    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFailure:
    """Send a worker's failure to the coordinator."""

    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class AskToStop:
    """Ask the coordinator to have the job saved and left."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AskToLeave:
    """Ask the coordinator to have this node's workers leave the group; the job goes on."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TellLeaveTimedOut:
    """Tell the coordinator, and the reader: this node was to leave at a step boundary, and is
    ended now without one."""

    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Send TimerFired at this instant; replaces the one before. None: no timer."""

    at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitAgent:
    """No process is left: end."""

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
