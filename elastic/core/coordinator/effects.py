"""What the coordinator wants done, in the imperative."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Write the generation to the store, guarded; answer with GenerationPersisted or Refused."""

    generation: Generation
    may_train: tuple[Generation, ...] = ()
    """Earlier ones whose groups may train still: to be written with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnounceGeneration:
    """Tell every agent."""

    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class SettleGeneration:
    """Tell every agent the settled form of the planned generation that was announced last."""

    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceWorker:
    """Have the node's agent end this worker and start another."""

    node: NodeId
    worker: WorkerId
    kind: FailureKind
    message: str
    place: str = ""
    """FILE:LINE of the script at which it hangs, if that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DismissWorkers:
    """The job is complete: every worker may end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitCheckpoint:
    """Every part is on storage: write the manifest."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AbandonCheckpoint:
    """The checkpoint of `step` will never be whole.

    reason: failed, or member_lost: nothing is wrong with storage.
    """

    generation: int
    step: int
    message: str
    reason: str = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeGroup:
    """Ask the members in contact for their progress at this moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDrained:
    """No worker of the leaving node is in the group any more."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDown:
    """Another coordinator decides now."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Send TimerFired at this instant; replaces the one before. None: no timer."""

    at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWasSlow:
    """For the record: a step has lasted suspiciously long, and is committed after all."""

    step: int
    lasted_s: float
    usual_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainHang:
    """Look where the members are, before they are told anything else, and say who keeps the others
    waiting; answer with HangExplained. Nothing waits for that."""

    generation: Generation
    """The group that stands still."""
    step: int
    standing_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainSlowStep:
    """For the record: a step lasts longer than usual. Look where the members are, and say who has
    not come to what the others wait for."""

    generation: Generation
    step: int
    lasts_s: float
    usual_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """For the record: members that the last generation lost, noticed at `at`."""

    workers: tuple[WorkerId, ...]
    reason: ChangeReason
    at: float
    standing_since: float | None = None
    """Since when no step can have been committed, if that is long before `at`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefuseNewcomers:
    """For the record: newcomers fail in the same way again and again; the group trains on, and
    lets none in for `retry_s` seconds."""

    node: NodeId
    failure: Failure
    retry_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EndJob:
    """Nothing is left to do: tell the agents and end with this exit code."""

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
