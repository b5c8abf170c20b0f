"""The phases of a job, and the transitions between them, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class JobPhase(enum.Enum):
    """What the job is doing."""

    GATHERING = "gathering"
    FORMING = "forming"
    RUNNING = "running"
    WAITING = "waiting"  # below the minimum: survivors hold their state in memory
    DRAINING = "draining"
    FINISHED = "finished"
    FAILED = "failed"


TERMINAL = (JobPhase.FINISHED, JobPhase.FAILED)

# The phases that may follow each phase. The diagram in docs/ARCHITECTURE.md is generated from this.
TRANSITIONS: Mapping[JobPhase, frozenset[JobPhase]] = {
    JobPhase.GATHERING: frozenset(
        {JobPhase.FORMING, JobPhase.DRAINING, JobPhase.FINISHED, JobPhase.FAILED}
    ),
    JobPhase.FORMING: frozenset(
        {
            JobPhase.RUNNING,
            JobPhase.WAITING,
            JobPhase.DRAINING,
            JobPhase.FINISHED,
            JobPhase.FAILED,
        }
    ),
    JobPhase.RUNNING: frozenset(
        {
            JobPhase.FORMING,
            JobPhase.WAITING,
            JobPhase.DRAINING,
            JobPhase.FINISHED,
            JobPhase.FAILED,
        }
    ),
    JobPhase.WAITING: frozenset(
        {JobPhase.FORMING, JobPhase.DRAINING, JobPhase.FINISHED, JobPhase.FAILED}
    ),
    JobPhase.DRAINING: frozenset({JobPhase.FINISHED, JobPhase.FAILED}),
    JobPhase.FINISHED: frozenset(),
    JobPhase.FAILED: frozenset(),
}
