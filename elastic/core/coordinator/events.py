"""What the coordinator is told, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import Failure, NodeId, WorkerId, WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReported:
    """A node's whole view of its workers; replaces the one before."""

    node: NodeId
    slots: int
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesReported:
    """Several nodes did, before anything else happened."""

    reports: tuple[NodeReported, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReconnected:
    """The node's agent has opened another stream before the end of the one before was noticed:
    what was said on that may never have arrived."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """The node's stream has ended; its processes may live on."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGone:
    """Nothing of the node runs any more, for certain."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLeaving:
    """The node is to take no part any more: its workers leave at a step boundary."""

    node: NodeId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWelcomed:
    """The node may take part again."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed:
    """A worker ended otherwise than by finishing."""

    node: NodeId
    failure: Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicScriptReported:
    """The agents run a script that was written for torchrun: its workers restart all together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReported:
    """Steps committed, their usual duration, and that of the one under way, as rank 0 says; or,
    asked for, any member."""

    generation: int
    committed: int
    step_s: float
    in_step_s: float
    probed: bool = False
    first_step: bool = False
    """The step under way is the first of its group."""
    worker: WorkerId = ""
    waiting_s: float = 0.0
    """How long it has waited for others to come to a call of the script."""
    collectives: int = 0
    """Inside a call of the script: those of its group so far."""
    quiet_s: float = 0.0
    """How long it has begun no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReported:
    """A member's part of the checkpoint of `step` is on storage."""

    worker: WorkerId
    generation: int
    step: int
    index: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCommitted:
    """The checkpoint of `step` that the group of `generation` has saved can be loaded."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReportedFailed:
    """A member could not write its part of the checkpoint of `step`."""

    generation: int
    step: int
    message: str
    worker: WorkerId = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPersisted:
    """The store holds the generation: it exists."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistRefused:
    """The store did not take the generation: this coordinator leads no more."""

    number: int
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """The job is to leave at a step boundary after saving."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HangExplained:
    """The members of a group that stands still have told where they are."""

    generation: int
    """The group's."""
    verdict: Diagnosis


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerFound:
    """A member holds up the others in every step, and operators want it replaced."""

    worker: WorkerId
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerFired:
    """The instant asked for by SetTimer has come."""


Event = (
    NodeReported
    | NodesReported
    | NodeReconnected
    | NodeLost
    | NodeGone
    | NodeLeaving
    | NodeWelcomed
    | WorkerFailed
    | ClassicScriptReported
    | ProgressReported
    | ShardReported
    | CheckpointCommitted
    | SaveReportedFailed
    | GenerationPersisted
    | PersistRefused
    | StopRequested
    | HangExplained
    | StragglerFound
    | TimerFired
)
