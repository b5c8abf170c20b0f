"""What each part of a step takes on this rank, as sums that all ranks take at the same steps.

The script's thread adds a difference of clock readings here and there, about two microseconds a
step with the hook of `Arrival`. A comparison of ranks needs sums over the same steps, so they are
put down after every so many committed steps, for the reporting thread to send.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.v1 import job_pb2 as pb
from elastic.worker.arrival import Arrival
from elastic.worker.core_wait import CoreWait
from elastic.worker.time_spent import TimeSpent

_FEWEST_STEPS, _MOST_STEPS = 8, 1 << 20
_INTERVAL_S = 0.5  # at least, between two reports of this kind
_INTERVAL_PER_RANK_S = 0.005  # so that a coordinator hears 200 of them a second at most


def window_steps(step_s: float, world_size: int) -> int:
    """After how many steps sums are put down: a power of two, so that ranks which find different
    numbers have half of their instants in common. step_s: how long steps usually take; 0: not
    known."""
    wanted_s = max(_INTERVAL_S, world_size * _INTERVAL_PER_RANK_S)
    steps = _FEWEST_STEPS
    while 0.0 < steps * step_s < wanted_s and steps < _MOST_STEPS:
        steps *= 2
    return steps


class Pace:
    """Sums since the process began; only their differences within one group mean anything."""

    def __init__(self, spent: TimeSpent) -> None:
        self.arrival = Arrival()
        self.mask = _FEWEST_STEPS - 1
        """Sums are put down where the number of committed steps has none of these bits."""
        self.wait_s = self.transfer_s = self.after_s = self.between_s = 0.0
        self.reduced_at = 0.0
        self.arrivals = 0
        """Backward passes of which it is known when the last local gradient was ready."""
        self.reductions = 0
        self.on_window: Callable[[], None] = _nothing
        """Called by the script's thread when there is more to send."""
        self._spent = spent
        self._core_wait = CoreWait()
        self._missed = 0
        self._newest: tuple[float, ...] | None = None

    def reduced(self, began: float, now: float) -> None:
        """A backward pass that averages gradients has lasted from `began` to `now`."""
        at = self.arrival.at
        if at > began:
            self.wait_s += now - at
            self.arrivals += 1
        self.reductions += 1
        self.reduced_at = now

    def put_down(self, committed: int, step_s: float, world_size: int) -> None:
        """A step was committed after which sums are wanted."""
        spent = self._spent
        self.mask = window_steps(step_s, world_size) - 1
        aside_s = spent.calls_s + spent.saves_s
        self._newest = (
            spent.generation,
            committed,
            spent.steps,
            spent.steps_s - aside_s,
            spent.data_s,
            self.transfer_s,
            self.wait_s,
            self.after_s,
            self.between_s - aside_s,
            self._core_wait.seconds(),
            self.arrivals,
            self.reductions,
        )
        missed, self._missed = self._missed, self.reductions - self.arrivals
        if self._missed > missed:
            self.arrival.look_again()
        self.on_window()

    def to_pb(self) -> pb.Pace | None:
        """What was put down last; None before."""
        newest = self._newest
        if newest is None:
            return None
        generation, committed, steps, *sums, arrivals, reductions = newest
        total_s, data_s, transfer_s, wait_s, after_s, between_s, no_core_s = sums
        return pb.Pace(
            generation=int(generation),
            committed=int(committed),
            steps=int(steps),
            total_s=total_s,
            data_s=data_s,
            transfer_s=transfer_s,
            wait_s=wait_s,
            after_s=after_s,
            between_s=between_s,
            no_core_s=no_core_s,
            arrivals=int(arrivals),
            reductions=int(reductions),
        )


def _nothing() -> None:
    """Nobody sends it."""
