"""The options of a job, and the parts of a leader that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoint.directory import CheckpointDirectory
from elastic.coordinator.leadership import Leadership
from elastic.coordinator.records import since_boot
from elastic.coordinator.saves import CheckpointCommits
from elastic.coordinator.step_recorder import CurveFiles, LedgerFile, StepFile, StepRecorder
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.runtime.journal import Journal
from elastic.store.job_runs import DEFAULT_RUN


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """One job's options, as the operator has set them."""

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
    """Seconds after which an agent that is cut off ends its workers; 0: never."""
    nodes_may_fail: bool = True
    """The loss of a node is no failure of its workers."""
    replaces_stragglers: bool = False
    address: str = ""
    """host:port where agents and operators reach this coordinator; empty for `elastic run`."""
    certificate_expires: Callable[[], float] = lambda: 0.0
    """When the coordinator's certificate expires, in Unix seconds; 0 without TLS."""


def make_machine(options: JobOptions, leadership: Leadership, now: float) -> Coordinator:
    """Make the machine; it goes on from what earlier leaders stored. `now`: monotonic seconds."""
    return Coordinator(
        CoordinatorSettings(
            incarnation=leadership.incarnation,
            formation=options.formation,
            stall=options.stall,
            max_restarts=options.max_restarts,
            restart_window_s=options.restart_window_s,
            stop_grace_s=options.stop_grace_s,
            saves=options.checkpoints is not None,
            nodes_may_fail=options.nodes_may_fail,
            agents_outlive=options.isolation_timeout_s > 0.0,
        ),
        last=leadership.last_generation,
        restarted_at=since_boot(leadership.records.restarts),
        may_train=leadership.last.may_train if leadership.last is not None else (),
        begun=leadership.records.begun,
        now=now,
    )


def make_recorders(
    options: JobOptions,
    leadership: Leadership,
    journal: Journal,
    *,
    broadcast: Callable[..., None],
    may_record: Callable[[], bool],
) -> tuple[StepRecorder | None, StepRecorder | None]:
    """Return (ledger's, curve's), None for one that is not wanted. Raises ConfigurationError."""

    def recorder(name: str, file: StepFile) -> StepRecorder:
        return StepRecorder(
            file,
            journal,
            name=name,
            broadcast=broadcast,
            may_record=may_record,
            is_required=leadership.last is None,
            newest_group=trains.number if trains is not None else 0,
        )

    trains = leadership.newest_that_trains
    run, ledger, curve = leadership.incarnation, None, None
    alone = not options.address  # `elastic run`, which may be refused before it has begun
    if options.ledger is not None:
        ledger = recorder("ledger", LedgerFile(options.ledger, incarnation=run, alone=alone))
    if options.curve is not None or options.tensorboard is not None:
        files = CurveFiles(options.curve, options.tensorboard, incarnation=run, alone=alone)
        curve = recorder("curve", files)
    return ledger, curve


def make_commits(options: JobOptions, leadership: Leadership) -> CheckpointCommits | None:
    """Return None for a job without checkpoints."""
    if options.checkpoints is None:
        return None
    return CheckpointCommits(
        options.checkpoints,
        job=options.job,
        run=leadership.incarnation,
        keep_last=options.keep_checkpoints,
    )
