"""What `elastic run` has in common with a coordinator and an agent of a job of many nodes: the
same settings make the same options of each."""

from __future__ import annotations

import os

from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.coordinator.job_options import JobOptions
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.run import RunSettings
from elastic.settings.shared import StragglerAction


def checkpoint_directory(url: str | None) -> CheckpointDirectory | None:
    """The directory, once it was written to and read from.

    Raises ConfigurationError for one that cannot be used, TransientError for one that may be later.
    """
    if url is None:
        return None
    directory = open_directory(url)
    directory.probe()
    return directory


def checkpoint_place(url: str | None) -> str:
    """The same for workers, whose working directory may be another; empty for none."""
    if url is None or "://" in url:
        return url or ""
    return os.path.abspath(url)


def job_options(
    settings: RunSettings | CoordinatorSettings,
    formation: FormationPolicy,
    checkpoints: CheckpointDirectory | None,
) -> JobOptions:
    """What both kinds of coordinator are told of the job."""
    return JobOptions(
        job=settings.job,
        formation=formation,
        stall=StallPolicy(
            floor_s=settings.hang_timeout_s,
            factor=settings.hang_factor,
            first_step_s=settings.first_step_timeout_s,
            pause_s=settings.pause_timeout_s,
        ),
        max_restarts=settings.max_restarts,
        restart_window_s=settings.restart_window_s,
        stop_grace_s=settings.stop_grace_s,
        checkpoints=checkpoints,
        keep_checkpoints=settings.keep_checkpoints,
        ledger=settings.ledger,
        curve=settings.curve,
        tensorboard=settings.tensorboard,
        replaces_stragglers=settings.straggler_action is StragglerAction.REPLACE,
    )
