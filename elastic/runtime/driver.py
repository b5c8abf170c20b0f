"""The loop around a pure machine: facts in as events, effects out as action."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

E_contra = TypeVar("E_contra", contravariant=True)
F_co = TypeVar("F_co", covariant=True)
E = TypeVar("E")
F = TypeVar("F")


class Machine(Protocol[E_contra, F_co]):
    """Takes an event at an instant and returns the effects, in order."""

    def handle(self, event: E_contra, now: float) -> Sequence[F_co]:
        """Take one event. `now`: monotonic seconds."""
        ...


class Driver(Generic[E, F]):
    """Feeds one machine from one event loop.

    `execute` must not block; what takes time becomes a task that posts its result. Events posted
    while one is being handled wait their turn, so the machine never sees itself half-way.

    before: what has waited until now, and takes its turn before an event that is posted. observe:
    sees each event with the machine's answer, before that is carried out.
    on_error: takes what the machine or `execute` raises, which ends the daemon. Most events come
    from callbacks and streams, whose callers would log the error or drop it and go on.
    """

    def __init__(
        self,
        machine: Machine[E, F],
        execute: Callable[[F], None],
        timer_event: E,
        *,
        on_error: Callable[[BaseException], None],
        before: Callable[[], Iterable[E]] = tuple,
        observe: Callable[[E, Sequence[F], float], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._execute = execute
        self._timer_event = timer_event
        self._on_error, self._before, self._observe = on_error, before, observe
        self._clock = clock
        self._queue: deque[E] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None

    def post(self, event: E) -> None:
        """Hand an event to the machine and carry out what it answers."""
        self._queue.extend(self._before())
        self._queue.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._queue:
                event, now = self._queue.popleft(), self._clock()
                effects = self._machine.handle(event, now)
                self._observe(event, effects, now)
                for effect in effects:
                    self._execute(effect)
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            self._handling = False

    def set_timer(self, at: float | None) -> None:
        """Post the timer event at `at` (seconds of the clock); replaces the one before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay_s = max(0.0, at - self._clock())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.post, self._timer_event)

    def close(self) -> None:
        """No more timers."""
        self.set_timer(None)
