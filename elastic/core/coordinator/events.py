"""The events that the coordinator's machine handles, in the past tense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import Failure, NodeId, WorkerId, WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReported:
    """A node has sent its whole view of its workers, which replaces the previous one."""

    node: NodeId
    slots: int
    workers: tuple[WorkerStatus, ...]
    restarting: bool = False
    """Its agent is about to start again while its workers train on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesReported:
    """Several nodes have sent their views. One decision follows from all of them."""

    reports: tuple[NodeReported, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReconnected:
    """The node's agent has opened another stream before the coordinator noticed that the previous
    one had ended. Messages sent on the previous stream may never have arrived."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """The node's stream has ended; its processes may still run."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGone:
    """All workers of the node that may have been members have certainly ended: the node itself has,
    or its agent has another command and has found none of them."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLeaving:
    """The node should no longer take part: its workers leave at a step boundary."""

    node: NodeId
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWelcomed:
    """The node may take part again."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed:
    """A worker ended without finishing its script."""

    node: NodeId
    failure: Failure
    age_s: float = 0.0
    """Time since its agent noticed: agents repeat it to a new leader."""
    committed: int = 0
    """How many steps its node's workers have committed, in the generation `committed_in`. Nobody
    may have reported the last ones."""
    committed_in: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassicScriptReported:
    """The agents run a script written for torchrun: all of its workers restart together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReported:
    """Rank 0, or any member that was asked (`probed`), has reported the steps committed, their
    usual duration, and for how long the step under way has lasted."""

    generation: int
    committed: int
    step_s: float
    in_step_s: float
    probed: bool = False
    first_step: bool = False
    """The step under way is the first of its group."""
    worker: WorkerId = ""
    waiting_s: float = 0.0
    """How long the worker has waited for others to come to the same `session.run`."""
    collectives: int = 0
    """Inside `session.run`: how many collectives of its group the worker has begun so far."""
    quiet_s: float = 0.0
    """For how long the worker has begun no further collective."""
    longest_step_s: float = 0.0
    """The longest duration among the worker's recent steps; 0: not known."""
    steps_total_s: float = 0.0
    """The sum of the durations of the steps that the worker has committed; 0: not known."""
    joining: bool = False
    """The worker has not come to its group's state yet, or fails to: `committed` says nothing of
    the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBegan:
    """Members have committed the first step of their group, which went on from `step`, or have
    saved that step. So a state of the job is known, and later steps of other groups are void."""

    generation: int
    step: int


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
    """The checkpoint of `step`, saved by the group of `generation`, can be loaded."""

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
    """The store holds the generation, so it exists."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistRefused:
    """The store refused the generation: this coordinator is no longer the leader."""

    number: int
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """The job should save and leave at a step boundary."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HangExplained:
    """The members of a group that stands still have reported where they are."""

    generation: int
    """The generation of that group."""
    verdict: Diagnosis


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerFound:
    """A member slows down the others in every step, and operators want such members replaced."""

    worker: WorkerId
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersProbed:
    """A node has probed workers of other nodes for the round `number`."""

    node: NodeId
    number: int
    unreached: Mapping[WorkerId, str]
    """Why it has not reached these of them."""
    by_port: frozenset[WorkerId] = frozenset()
    """Those whose stores' ports answer, but not a port of their node that the kernel chose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerFired:
    """The instant given by SetTimer has come."""


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
    | GroupBegan
    | ShardReported
    | CheckpointCommitted
    | SaveReportedFailed
    | GenerationPersisted
    | PersistRefused
    | StopRequested
    | HangExplained
    | StragglerFound
    | PeersProbed
    | TimerFired
)
