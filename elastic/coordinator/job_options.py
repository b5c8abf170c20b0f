"""What the coordinator is told of the job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoint.directory import CheckpointDirectory
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.store.job_runs import DEFAULT_RUN


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """One job, as the operator wants it."""

    job: str
    run_id: str = DEFAULT_RUN
    formation: FormationPolicy
    stall: StallPolicy
    max_restarts: int
    restart_window_s: float
    stop_grace_s: float
    checkpoints: CheckpointDirectory | None = None
    keep_checkpoints: int = 3
    ledger: Path | None = None
    curve: Path | None = None
    tensorboard: Path | None = None
    quarantine_after: int = 0
    quarantine_window_s: float = 600.0
    isolation_timeout_s: float = 0.0
    """After which agents that are cut off end their workers; 0: they never do."""
    replaces_stragglers: bool = False
    address: str = ""
    """Where it is reached, for people."""
