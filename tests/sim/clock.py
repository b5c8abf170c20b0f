"""Simulated time: a queue of calls, the only source of randomness, and links that keep order."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[..., None]
# A history takes some 700 calls. One that takes more than this does not come to an end.
MOST_CALLS = 100_000


class Endless(Exception):
    """The history has scheduled more than MOST_CALLS calls."""


class Clock:
    """Runs calls in the order of their instants, and of their scheduling if these are equal."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._fraction = self.random.random
        self._queue: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, instant_s: float, call: Call, *args: Any) -> None:
        asked = self._asked = self._asked + 1
        instant_s = instant_s if instant_s > self.now else self.now
        heappush(self._queue, (instant_s, asked, call, args))

    def after(self, delay_s: float, call: Call, *args: Any) -> None:
        asked = self._asked = self._asked + 1
        now = self.now
        instant_s = now + delay_s if delay_s > 0.0 else now
        heappush(self._queue, (instant_s, asked, call, args))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._fraction()

    def chance(self, probability: float) -> bool:
        return self._fraction() < probability

    def run(self, *, until_s: Callable[[], float], ended: Callable[[], bool]) -> None:
        """Run calls until `ended()`, the queue is empty, or the instant `until_s()` has passed."""
        queue, limit_s = self._queue, -1.0
        while queue and not ended():
            if queue[0][0] > limit_s:
                limit_s = until_s()  # it only grows
                if queue[0][0] > limit_s:
                    return
            self.now, _, call, args = heappop(queue)
            call(*args)
            if self._asked > MOST_CALLS:
                raise Endless


class Timer:
    """Calls at the instant that was set last, with few entries in the clock's queue."""

    def __init__(self, clock: Clock, call: Call) -> None:
        self._clock, self._call = clock, call
        self._at: float | None = None
        self._queued_at: float | None = None

    def set(self, at: float | None) -> None:
        if at is not None and at < self._clock.now:
            at = self._clock.now
        self._at = at
        if at is not None and (self._queued_at is None or at < self._queued_at):
            self._queued_at = at
            self._clock.at(at, self._look, at)

    def _look(self, queued_at: float) -> None:
        if queued_at != self._queued_at:
            return
        self._queued_at = None
        if self._at is not None and self._at <= self._clock.now:
            self._at = None
            self._call()
        else:
            self.set(self._at)


class SteadyClock(Clock):
    """A clock without randomness: every duration is the middle of its bounds."""

    def __init__(self) -> None:
        super().__init__(0)

    def between(self, low: float, high: float) -> float:
        return (low + high) / 2

    def chance(self, probability: float) -> bool:
        return probability >= 1.0


class Link:
    """One direction of a connection: delays messages, never reorders them."""

    def __init__(self, clock: Clock, low_s: float, high_s: float) -> None:
        self._clock, self._low_s, self._high_s = clock, low_s, high_s
        self._last = 0.0
        self.open = True

    def send(self, call: Call, *args: Any) -> None:
        if not self.open:
            return
        clock = self._clock
        arrival = clock.now + clock.between(self._low_s, self._high_s)
        if arrival > self._last:
            self._last = arrival
        clock.at(self._last, self._deliver, call, args)

    def _deliver(self, call: Call, args: tuple[Any, ...]) -> None:
        if self.open:
            call(*args)
