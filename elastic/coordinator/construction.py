"""What a coordinator in office is made of, as the job's options want it."""

from __future__ import annotations

from collections.abc import Callable

from elastic.coordinator.checkpoint_commits import CheckpointCommits
from elastic.coordinator.curve_files import CurveFiles
from elastic.coordinator.job_options import JobOptions
from elastic.coordinator.leadership import Leadership
from elastic.coordinator.ledger_file import LedgerFile
from elastic.coordinator.records import since_boot
from elastic.coordinator.step_recorder import StepFile, StepRecorder
from elastic.core.coordinator.machine import Coordinator, CoordinatorSettings
from elastic.runtime.journal import Journal


def make_machine(options: JobOptions, leadership: Leadership, now: float) -> Coordinator:
    """It adopts what the leaders before have left. `now`: monotonic seconds."""
    return Coordinator(
        CoordinatorSettings(
            incarnation=leadership.incarnation,
            formation=options.formation,
            stall=options.stall,
            max_restarts=options.max_restarts,
            restart_window_s=options.restart_window_s,
            stop_grace_s=options.stop_grace_s,
            saves=options.checkpoints is not None,
        ),
        last=leadership.last_generation,
        restarted_at=since_boot(leadership.records.restarts),
        may_train=leadership.last.may_train if leadership.last is not None else (),
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
    """(of the ledger, of the curve), None for a job without. Raises ConfigurationError."""

    def recorder(name: str, file: StepFile) -> StepRecorder:
        return StepRecorder(file, journal, name=name, broadcast=broadcast, may_record=may_record)

    run, ledger, curve = leadership.incarnation, None, None
    if options.ledger is not None:
        ledger = recorder("ledger", LedgerFile(options.ledger, incarnation=run))
    if options.curve is not None or options.tensorboard is not None:
        files = CurveFiles(options.curve, options.tensorboard, incarnation=run)
        curve = recorder("curve", files)
    return ledger, curve


def make_commits(options: JobOptions, leadership: Leadership) -> CheckpointCommits | None:
    """None for a job without checkpoints."""
    if options.checkpoints is None:
        return None
    return CheckpointCommits(
        options.checkpoints,
        job=options.job,
        run=leadership.incarnation,
        keep_last=options.keep_checkpoints,
    )
