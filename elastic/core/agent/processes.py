"""What the agent knows of one of its processes, and what that means."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from elastic.core.agent import events as ev
from elastic.core.membership import (
    Failure,
    FailureKind,
    WorkerPhase,
    WorkerStatus,
    signal_name,
)

_RUNNING = (WorkerPhase.JOINING, WorkerPhase.TRAINING)


@dataclass(slots=True)
class Process:
    """A worker, from the request to fork it until it is gone."""

    status: WorkerStatus
    deadline: float | None = None
    """When it must have asked for a group."""
    adopted: bool = False
    """Found alive, left by an earlier agent, and not heard of since: it may have a slot."""
    ending: Failure | None = None
    """Why it was told to end, if it was."""
    reported: Failure | None = None
    """What the script raised, if it did."""
    group: int = 0
    """The newest generation that it is or was a member of."""
    compiled: bool = False
    """Its script was seen to run torch.compile, so it gets more time."""
    retired: bool = False
    """It was asked to end as its whole group does: that is no failure of its own."""
    let_go: bool = False
    """Retired and finished, it was told that nobody needs it any more."""
    kill_at: float | None = None
    """Retired, it is killed if it still runs by then."""

    @property
    def idle(self) -> bool:
        """A spare that can take a slot now."""
        return self.status.phase is WorkerPhase.SPARE and self.status.slot is None

    @property
    def runs(self) -> bool:
        """Its script is under way in a group."""
        return self.status.phase in _RUNNING

    @property
    def trained(self) -> bool:
        """Its script is or was in a group, and is not done."""
        return self.status.generation > 0 and self.status.phase is not WorkerPhase.FINISHED

    @property
    def hears_generations(self) -> bool:
        """It has a slot, and so may become a member."""
        return self.status.phase not in (WorkerPhase.STARTING, WorkerPhase.SPARE)

    def ended_well(self, exited: ev.WorkerExited) -> bool:
        """Its script was done."""
        clean = exited.unseen or (exited.exit_code == 0 and exited.signal == 0)
        return clean and self.status.phase is WorkerPhase.FINISHED


def failure_of(process: Process, exited: ev.WorkerExited) -> Failure:
    """What ended the process: our own decision, what the script raised, or what the kernel says."""
    if process.ending is not None:
        return process.ending
    if process.reported is not None and exited.signal == 0:
        return process.reported
    worker = process.status.worker
    if exited.unseen:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            signature="ended unseen",
            message="has ended; how is not known, as the zygote does not answer",
        )
    if exited.signal == signal.SIGKILL and exited.out_of_memory:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=exited.signal,
            signature="out of memory",
            message=(
                f"was ended by {signal_name(exited.signal)}: the kernel had no memory left for the "
                "processes of this node; raise its limit, or have the script use less"
            ),
        )
    if exited.signal:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=exited.signal,
            signature=f"signal {exited.signal}",
            message=f"was ended by {signal_name(exited.signal)}",
        )
    return Failure(
        worker=worker,
        kind=FailureKind.EXIT_CODE,
        code=exited.exit_code,
        signature=f"exit code {exited.exit_code}",
        message=f"ended with exit code {exited.exit_code} before its script was done",
    )
