"""Builds options from the settings that `elastic run` shares with `elastic coordinator` and
`elastic agent`."""

from __future__ import annotations

import os

from elastic.checkpoint.catalog import require_parent
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.coordinator.job_options import JobOptions
from elastic.core.coordinator.progress import StallPolicy
from elastic.core.coordinator.view import FormationPolicy
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.run import RunSettings
from elastic.settings.shared import StragglerAction


def checkpoint_directory(url: str | None) -> CheckpointDirectory | None:
    """Open the directory, and try to write and read in it.

    Raises ConfigurationError if it cannot be used or is that of one checkpoint, TransientError if
    it cannot be used and that may change by itself.
    """
    if url is None:
        return None
    directory = open_directory(url)
    directory.probe()
    require_parent(directory)
    return directory


def checkpoint_place(url: str | None) -> str:
    """The URL, or the absolute path: workers may have another working directory. Empty for none."""
    if url is None or "://" in url:
        return url or ""
    return os.path.abspath(url)


def job_options(
    settings: RunSettings | CoordinatorSettings,
    formation: FormationPolicy,
    checkpoints: CheckpointDirectory | None,
) -> JobOptions:
    """The options of a job that `elastic run` and `elastic coordinator` have in common."""
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
