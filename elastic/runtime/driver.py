"""Drives a pure machine: hands it events and executes the effects that it returns."""

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
    """A pure machine: takes an event at an instant and returns its effects, in order."""

    def handle(self, event: E_contra, now: float) -> Sequence[F_co]:
        """Take one event at `now`, in monotonic seconds."""
        ...


class Driver(Generic[E, F]):
    """Feeds one machine from one event loop.

    `execute` must not block; work that takes time becomes a task that posts its result. Events
    posted while another one is handled wait, so the machine is never called recursively.

    before: returns events that have waited so far; they are handled before each posted event.
    observe: is called with each event and its effects before these are executed.
    on_error: is called with an error of the machine or of `execute`, and ends the daemon. Most
    events come from callbacks and streams, whose callers would log or drop the error and go on.
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
        """Handle an event and execute its effects. An error goes to `on_error` and is raised."""
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
        """Post the timer event at `at` (seconds of the clock), not at the last one; None: never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay_s = max(0.0, at - self._clock())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.post, self._timer_event)

    def close(self) -> None:
        self.set_timer(None)
