"""When the last local gradient of a step is ready: what tells a slow rank from those that wait.

DDP's all-reduce makes the backward pass equally long everywhere. A hook on the parameter whose
gradient comes last costs about a microsecond a step; which one that is, one step with a hook on
each parameter tells.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

_MOST_LOOKS = 8
"""A model whose last gradient is another one in each step is not looked at for ever."""


class Arrival:
    """Watches the parameters of the distributed models."""

    def __init__(self) -> None:
        self.at = 0.0
        """When a watched gradient was ready last, in monotonic seconds; 0: never."""
        self.learning = False
        """Every parameter has a hook, up to the next commit."""
        self._parameters: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        self._last: torch.Tensor | None = None
        self._looks = 0

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Of these the next step tells which gradient comes last, unless it is known."""
        known = self._parameters
        if len(known) != len(parameters) or any(
            a is not b for a, b in zip(known, parameters, strict=True)
        ):
            self._parameters = list(parameters)
            self.look_again()

    def look_again(self) -> None:
        """The gradient that came last comes no more: learn which one does now."""
        self._remove()
        self._last = None
        self.learning = self._looks < _MOST_LOOKS
        if self.learning:
            self._looks += 1
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._seen)  # type: ignore[no-untyped-call]
                for p in self._parameters
                if p.requires_grad and p.is_leaf
            ]

    def learned(self) -> None:
        """A step was committed: one hook is enough."""
        self.learning = False
        last, self._last = self._last, None
        self._remove()
        if last is not None:
            hook = last.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            self._hooks = [hook]

    def _seen(self, parameter: torch.Tensor) -> None:
        self.at, self._last = time.monotonic(), parameter

    def _ready(self, _: torch.Tensor) -> None:
        self.at = time.monotonic()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
