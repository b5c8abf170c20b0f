"""Which of its workers' figures of time an agent passes on, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.v1 import job_pb2 as pb

EVERY_S = 10.0


@dataclass(slots=True)
class _Worker:
    newest: pb.TimeSpent
    told_at: float
    told: bool
    pace: tuple[int, int] = (0, 0)
    """The generation and the step of the sums that were passed on last."""


class TimeReports:
    """Now and then is often enough, since the figures are sums; but the last ones are told."""

    def __init__(
        self,
        send: Callable[[pb.WorkerTime], None],
        send_pace: Callable[[pb.WorkerPace], None] = lambda _: None,
    ) -> None:
        self._send, self._send_pace = send, send_pace
        self._workers: dict[str, _Worker] = {}

    def heard(self, worker: str, spent: pb.TimeSpent, now: float, *, told: bool) -> None:
        """A worker has said so; told: it goes to the coordinator with what it came with."""
        known = self._workers.setdefault(worker, _Worker(spent, now, told=False))
        known.newest = spent
        if told:
            known.told, known.told_at = True, now
        else:
            known.told = False
            if now - known.told_at >= EVERY_S:
                self.tell(worker, now)

    def heard_pace(self, worker: str, pace: pb.Pace) -> None:
        """A worker has put down sums, after `heard`: each is passed on once, since ranks are
        compared at the same steps. Workers put them down seldom enough."""
        known, newest = self._workers.get(worker), (pace.generation, pace.committed)
        if known is not None and newest != known.pace:
            known.pace = newest
            self._send_pace(pb.WorkerPace(worker=worker, pace=pace))

    def tell(self, worker: str, now: float) -> None:
        """Pass on what is new."""
        known = self._workers.get(worker)
        if known is not None and not known.told and known.newest.generation:
            known.told, known.told_at = True, now
            self._send(pb.WorkerTime(worker=worker, spent=known.newest))

    def forget(self, worker: str, now: float) -> None:
        """It has ended."""
        self.tell(worker, now)
        self._workers.pop(worker, None)
