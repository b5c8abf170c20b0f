"""Applies a scaling rule's factor around each optimizer step and nowhere else.

The rates that the script and its schedulers see are always the unscaled ones, so a scheduler that
multiplies the rate it finds cannot compound the factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ScaledOptimizer:
    """Hooks on one optimizer. `factor()` is asked at each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._unscaled: list[tuple[dict[str, Any], Any]] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def restore(self) -> None:
        """Put the unscaled rates back, also when the step raised."""
        for group, rate in self._unscaled:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._unscaled = []

    def _before(self, *_: Any) -> None:
        self.restore()  # nothing to do unless the step before raised and the script went on
        factor = self._factor()
        if factor == 1.0:
            return
        groups = _with_own_rate(self._optimizer)
        self._unscaled = [(group, _copied(group["lr"])) for group in groups]
        for group in groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] = group["lr"] * factor

    def _after(self, *_: Any) -> None:
        self.restore()


def _with_own_rate(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameter groups, without those that share the tensor of an earlier one: torch gives the
    same to all groups that are not given a rate of their own."""
    seen: set[int] = set()
    groups = []
    for group in optimizer.param_groups:
        rate = group["lr"]
        if isinstance(rate, torch.Tensor) and id(rate) in seen:
            continue
        seen.add(id(rate))
        groups.append(group)
    return groups


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
