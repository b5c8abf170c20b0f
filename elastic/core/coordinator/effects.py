"""The effects of the coordinator's machine: what the daemon should do, in the imperative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core.coordinator.connections import Peer, Unreached
from elastic.core.membership import (
    ChangeReason,
    Failure,
    FailureKind,
    Generation,
    NodeId,
    WorkerId,
)
from elastic.core.restarts import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistGeneration:
    """Write the generation to the store, guarded by the election key. Answer with
    GenerationPersisted or PersistRefused."""

    generation: Generation
    may_train: tuple[Generation, ...] = ()
    """Earlier generations whose groups may still train. They are written together with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnounceGeneration:
    """Tell every agent about the generation."""

    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class SettleGeneration:
    """Tell every agent the settled form of the generation that was announced last."""

    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceWorker:
    """Tell the node's agent to end this worker and start another."""

    node: NodeId
    worker: WorkerId
    kind: FailureKind
    message: str
    place: str = ""
    """FILE:LINE of the script at which the worker hangs; empty if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DismissWorkers:
    """Tell every agent that the job is complete and its workers may exit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitCheckpoint:
    """Write the manifest of the checkpoint: all of its parts are on storage."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AbandonCheckpoint:
    """Tell the members that the checkpoint of `step` will never be complete.

    reason: "failed"; "member_lost", where nothing is wrong with storage; or "superseded", where the
    job has gone on from an earlier step.
    """

    generation: int
    step: int
    message: str
    reason: str = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeGroup:
    """Ask the members in contact for their current progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePeers:
    """Ask each of these nodes which of the other nodes' workers it reaches, within `within_s`."""

    number: int
    peers: Mapping[NodeId, tuple[Peer, ...]]
    within_s: float
    all_ports: bool = False
    """Also try a port of each peer's node that the kernel chose, as those of gloo and NCCL are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersUnreachable:
    """Record who has not reached whom, and the nodes that are left out because of it."""

    unreached: tuple[Unreached, ...]
    at: float
    left_out: tuple[NodeId, ...] = ()
    retry_s: float = 0.0
    """For how long they may not join a group that trains."""
    parted: bool = False
    """It is why the group is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDrained:
    """Tell the leaving node that none of its workers is in the group any more."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDown:
    """Give up the leadership: another coordinator decides now."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Send TimerFired at this instant. It replaces the previous timer; None: no timer."""

    at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWasSlow:
    """Record that a step took suspiciously long and was committed after all."""

    step: int
    lasted_s: float
    usual_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainHang:
    """Ask the members where they are, before they are told anything else, and find out which of
    them keeps the others waiting. Answer with HangExplained; no decision waits for it. A generation
    may be told to members only once they have said where they are, or had time to."""

    generation: Generation
    """The group that stands still."""
    step: int
    standing_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainSlowStep:
    """Record why a step takes longer than usual: ask the members where they are, and find those
    that have not reached what the others wait for."""

    generation: Generation
    step: int
    lasts_s: float
    usual_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Record which members the last generation lost. `at`: when the loss was noticed."""

    workers: tuple[WorkerId, ...]
    reason: ChangeReason
    at: float
    standing_since: float | None = None
    """Since when the group has stood still; None unless that is longer than a usual step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefuseNewcomers:
    """Record that newcomers keep failing in the same way. The group trains on and admits none for
    `retry_s` seconds."""

    node: NodeId
    failure: Failure
    retry_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EndJob:
    """End the job: tell the agents, and exit with this code."""

    exit_code: int
    verdict: Verdict | None = None
    failure: Failure | None = None
    message: str = ""


Effect = (
    PersistGeneration
    | AnnounceGeneration
    | SettleGeneration
    | ReplaceWorker
    | DismissWorkers
    | CommitCheckpoint
    | AbandonCheckpoint
    | ProbeGroup
    | ProbePeers
    | PeersUnreachable
    | NodeDrained
    | StepDown
    | SetTimer
    | StepWasSlow
    | ExplainHang
    | ExplainSlowStep
    | Lost
    | RefuseNewcomers
    | EndJob
)
