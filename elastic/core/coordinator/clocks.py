"""Since when the conditions hold that the decision about the group is patient with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.core.coordinator.planned import broke_before
from elastic.core.coordinator.view import FormationPolicy, Sighting, enough
from elastic.core.membership import Generation, WorkerId, WorkerPhase

_ARRIVED = (WorkerPhase.JOINING, WorkerPhase.TRAINING)


@dataclass(slots=True)
class Clocks:
    """Instants at which conditions of the view began to hold; None where one does not."""

    enough: float | None = None
    broken: float | None = None
    newcomers: float | None = None
    assembling: float | None = None
    slow: float = -math.inf
    """Until when the step under way was a slow one."""
    is_slow: bool = False

    def update(
        self,
        current: Generation | None,
        workers: Mapping[WorkerId, Sighting],
        policy: FormationPolicy,
        now: float,
        *,
        leaving: Generation | None = None,
        first_step: bool = False,
    ) -> None:
        """Start or stop each clock by what is known now.

        leaving: the group that trains until `current`, a planned change, is in place. Who has left
        it is awaited by nobody, but leaves the others unable to complete another step.
        first_step: the group is in its first.
        """
        number = current.number if current else 0
        members = current.worker_ids if current else frozenset()
        before = leaving.number if leaving else 0
        broken = newcomers = arrived = compiles = False
        for name, w in workers.items():
            status = w.status
            if status.phase is WorkerPhase.READY and name not in members:
                newcomers = True
            if before and status.generation == before and status.phase is WorkerPhase.READY:
                arrived = True
            if status.compiling is not None and status.took_part:
                compiles = True
            if status.generation == number:
                if status.broken and name in members:
                    broken = True
                if status.phase in _ARRIVED:
                    arrived = True
        if current is not None and leaving is not None:
            broken = broken or bool(broke_before(current, leaving, workers))
        can_form = not members and enough(workers, policy)
        self.enough = _start_or_stop(self.enough, can_form, now)
        self.broken = _start_or_stop(self.broken, broken, now)
        self.newcomers = _start_or_stop(self.newcomers, newcomers, now)
        if compiles or first_step or self.is_slow:
            self.slow = now
        self.is_slow = compiles or first_step
        if self.assembling is None and arrived:
            self.assembling = now


def _start_or_stop(since: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since
