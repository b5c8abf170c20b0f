"""A simulated thread: a generator that yields the seconds it sleeps, or what it waits for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from typing import Any

from tests.sim.clock import Clock


class Wait(enum.Enum):
    """What a thread waits for when it does not sleep."""

    NEWS = 1  # resumed at every piece of news, to look again
    COLLECTIVE = 2  # resumed only with the result or an error


class ScriptError(Exception):
    """The user's script raised."""


Body = Generator[float | Wait, Any, Any]


class Thread:
    """Runs `body`; `on_error` gets what it raises."""

    def __init__(self, clock: Clock, body: Body, on_error: Callable[[Exception], None]) -> None:
        self._clock, self._body, self._on_error = clock, body, on_error
        self._naps = 0
        self._over = False
        self._waits_for: Wait | None = None

    def start(self) -> None:
        self._go(self._body.send, None)

    def stop(self) -> None:
        """Never run the body again, nor close it: a killed process cleans nothing up."""
        self._over = True

    def nudge(self) -> None:
        """Resume the body if it waits for news."""
        if self._waits_for is Wait.NEWS:
            self._go(self._body.send, None)

    def complete(self, result: Any) -> None:
        """Resume the body with the result of its collective."""
        assert self._waits_for is Wait.COLLECTIVE or self._over
        self._go(self._body.send, result)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the body in place of a result of its collective."""
        assert self._waits_for is Wait.COLLECTIVE or self._over
        self._go(self._body.throw, error)

    def _go(self, resume: Callable[[Any], float | Wait], value: Any) -> None:
        if self._over:
            return
        self._naps += 1
        self._waits_for = None
        try:
            request = resume(value)
        except StopIteration:
            self._over = True
        except Exception as error:  # noqa: BLE001 - whatever ends the script ends its process
            self._over = True
            self._on_error(error)
        else:
            if request.__class__ is Wait:
                self._waits_for = request
            else:
                self._clock.after(request, self._slept, self._naps)

    def _slept(self, nap: int) -> None:
        if nap == self._naps:
            self._go(self._body.send, None)
