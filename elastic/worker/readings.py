"""Reads values of the script that may wait for a device, on threads whose wait costs nobody.

A tensor on a device can be read when the device has computed it. If it stands behind a collective
that hangs, that may be never: a thread that reads it must have nothing else to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

_PATIENCE_S = 5.0  # then a value is given up, and its thread is left to wait for it
_MOST_WAITING = 4  # threads that wait for values that were given up


class Wanted(NamedTuple):
    """A value to read, and where its number is to be put: `numbers[name]`."""

    numbers: dict[str, Any]
    name: str
    value: Any


class Reader:
    """Reads values in order, one batch at a time."""

    def __init__(self) -> None:
        self._batch: _Batch | None = None
        self._given_up: list[_Batch] = []

    def read(self, wanted: Iterable[Wanted], wait_s: float) -> None:
        """Begin to read these, unless earlier ones are being read. Wait for them, at most `wait_s`.

        The number of a value that cannot be read by then is put in its place later. A value that
        is no number is removed from `numbers`, if it is there.
        """
        batch = self._batch
        if batch is not None and batch.ended.is_set():
            self._batch = batch = None
        if batch is not None and time.monotonic() - batch.since > _PATIENCE_S:
            self._given_up.append(batch)
            self._batch = batch = None
        self._given_up = [each for each in self._given_up if not each.ended.is_set()]
        if batch is None and len(self._given_up) < _MOST_WAITING:
            todo = [each for each in wanted if not self.gives_up(each.value)]
            if todo:
                self._batch = batch = _Batch(todo)
        if batch is not None:
            batch.ended.wait(wait_s)

    def gives_up(self, value: Any) -> bool:
        """Whether this value was waited for in vain."""
        return any(each.value is value for each in self._given_up)


class _Batch:
    def __init__(self, wanted: list[Wanted]) -> None:
        self.value: Any = None
        """The value that is being read, since `since`."""
        self.since = time.monotonic()
        self.ended = threading.Event()
        threading.Thread(
            target=self._read, args=(wanted,), name="elastic-values", daemon=True
        ).start()

    def _read(self, wanted: list[Wanted]) -> None:
        try:
            for numbers, name, value in wanted:
                self.value, self.since = value, time.monotonic()
                number = as_number(value)
                if number is not None:
                    numbers[name] = number
                elif numbers.get(name) is value:
                    numbers.pop(name, None)
        finally:
            self.ended.set()


def is_ready(value: Any) -> bool:
    """Whether the value can be read at once: it is on the host."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return isinstance(value, int | float | str)


def as_number(value: Any) -> float | None:
    """The value as a number, which may wait for a device. None for anything else."""
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - a script's own object may raise anything
        return None
