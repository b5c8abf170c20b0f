"""Knows whose state counts after groups were aborted whose operations queue on a device.

An aborted operation sends garbage to peers that are in the same one. So all freeze their groups
before one aborts its own. A worker that was not known to be frozen then may have taken garbage for
a result: its state does not count, until it has been in a later group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.core.coordinator.generations import PastGenerations
from elastic.core.coordinator.view import ObservedWorker
from elastic.core.membership import Generation, WorkerId, WorkerStatus


class Freezing:
    """past: the recent generations, of which one of a single worker aborts nobody else's."""

    def __init__(self, past: PastGenerations) -> None:
        self._past = past
        self.queues = False
        """Operations of the job's groups queue: unplanned changes freeze them."""
        self._aborted_for = 0
        """The newest generation for which groups were aborted, or may have been."""
        self._frozen = frozenset[WorkerId]()
        """The workers that were frozen then."""

    def adopted(self, last: Generation, may_train: tuple[Generation, ...]) -> None:
        """An earlier leader may have settled `last`: all that it names were frozen then."""
        groups = (last,) if last.leave_after is None else (last, *may_train[-1:])
        self.queues, self._aborted_for = last.queues, last.number
        self._frozen = frozenset(last.frozen).union(*(g.worker_ids for g in groups))

    def heard(self, statuses: Iterable[WorkerStatus]) -> list[WorkerStatus]:
        """Return what workers have reported, without states that do not count."""
        found = [s if self._counts(s) else replace(s, has_state=False) for s in statuses]
        self.queues = self.queues or any(s.queues for s in found)
        return found

    def ended(self, number: int, workers: Iterable[ObservedWorker]) -> None:
        """Generation `number` is settled: all who have acknowledged it are frozen, and abort."""
        known = [w.status for w in workers if w.status.acknowledged >= number]
        self._frozen = frozenset(s.worker for s in known if self._counts(s))
        self._aborted_for = number

    def to_freeze(self, workers: Iterable[ObservedWorker]) -> tuple[WorkerId, ...]:
        """The workers in contact whose states count, if their operations queue."""
        return tuple(
            w.status.worker
            for w in workers
            if w.status.queues and w.out_of_contact_since is None and self._counts(w.status)
        )

    def counts_from(self, s: WorkerStatus) -> int:
        """The generation from which on the worker's state counts; 0: it counts as it is."""
        return 0 if self._counts(s) else self._aborted_for

    def _counts(self, s: WorkerStatus) -> bool:
        if not s.queues or s.worker in self._frozen or not 0 < s.generation < self._aborted_for:
            return True
        group = self._past.get(s.generation)
        return group is not None and group.world_size == 1
