"""The torchmetrics of a module, which count each step of the group once.

torchmetrics sums up on each rank and gathers when a metric is computed: the part of a lost worker
would be missing. So a metric that is updated in a step begins it empty, its states are reduced over
the group in the step's block, and what it had before is added. Then all ranks have the same, and
it never has to be gathered again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

from elastic.lightning.reduction import Reduction, Result
from elastic.lightning.refusals import refuse
from elastic.worker.step import Step

_REDUCED = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)


class StepMetrics:
    """Those of one module. It is tracked: a worker that joins needs what they hold."""

    def __init__(self, module: nn.Module) -> None:
        self.by_name: dict[str, Any] = {
            name: each for name, each in module.named_modules() if isinstance(each, Metric)
        }
        self._collections = [m for m in module.modules() if isinstance(m, MetricCollection)]
        self._step: Step | None = None
        self._before: dict[str, tuple[dict[str, Any], int]] = {}
        """By name: the states and the number of updates from before the step."""
        self._stand_in: dict[str, tuple[dict[str, Any], int]] = {}
        """The same from before the micro-batch, if that is a stand-in."""
        self._reduced: dict[str, dict[str, Result]] = {}
        for name, metric in self.by_name.items():
            metric.distributed_available_fn = _never
            touch = functools.partial(self._touch, name, metric)
            metric.update = _before(touch, metric.update)
            metric.forward = _before(touch, metric.forward)

    def begin(self, step: Step) -> None:
        """A step's block has begun."""
        self._step = step
        self._before.clear()
        self._stand_in.clear()

    def give_up(self) -> None:
        """The block does not count, and the metrics are put back as tracked state."""
        self._step = None

    def after_batch(self) -> None:
        """A micro-batch was computed: a stand-in does not count."""
        for name, (states, updates) in self._stand_in.items():
            _put(self.by_name[name], states, updates)
        self._stand_in.clear()

    def collect(self, reduction: Reduction) -> None:
        """Give the step's states to the reduction, after the last micro-batch."""
        step, self._step = self._step, None
        assert step is not None
        part = step.share / len(step.samples)
        self._reduced = {
            name: {
                attribute: _given(getattr(metric, attribute), function, part, reduction)
                for attribute, function in metric._reductions.items()
            }
            for name in sorted(self._before)
            for metric in [self.by_name[name]]
        }

    def take(self) -> None:
        """Take the step's states of all ranks, and add what was there before the step."""
        for name, reduced in self._reduced.items():
            metric, (states, updates) = self.by_name[name], self._before[name]
            used_forward = metric._forward_cache is not None
            for attribute, result in reduced.items():
                setattr(metric, attribute, result())
            metric._update_count, metric._computed = 1, None
            value = metric.compute() if used_forward else None
            metric._update_count = updates + 1
            if updates:
                metric._reduce_states(states)
            metric._computed, metric._forward_cache = None, value
        if self._reduced:
            self._share_states()

    # ---- as tracked state

    def state_dict(self) -> dict[str, Any]:
        """Return what the metrics hold that are in use."""
        return {
            name: {"updates": metric._update_count, "states": _states(metric)}
            for name, metric in self.by_name.items()
            if metric._update_count and metric._defaults
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what metrics hold; empty the others."""
        for name, metric in self.by_name.items():
            if name in state:
                _put(metric, state[name]["states"], state[name]["updates"])
            elif metric._update_count and metric._defaults:
                metric.reset()

    # ---- inside

    def _share_states(self) -> None:
        """Of metrics that share states, all refer to those of one: these are other tensors now."""
        for collection in self._collections:
            if collection._groups_checked:
                collection._state_is_copy = False
                collection._compute_groups_create_state_ref()

    def _touch(self, name: str, metric: Metric) -> None:
        """The script is about to update the metric."""
        step = self._step
        if step is None or not metric._defaults:
            return
        if name not in self._before:
            _require_reductions(name, metric)
            self._before[name] = metric._copy_state_dict(), metric._update_count
            metric.reset()
        if not step.counts and name not in self._stand_in:
            self._stand_in[name] = metric._copy_state_dict(), metric._update_count


def _never() -> bool:
    return False


def _before(touch: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **named: Any) -> Any:
        touch()
        return method(*args, **named)

    return wrapped


def _require_reductions(name: str, metric: Metric) -> None:
    for attribute, function in metric._reductions.items():
        is_list = isinstance(getattr(metric, attribute), list)
        if function not in (*_REDUCED, dim_zero_cat) and not (is_list and function is None):
            refuse(
                f"the metric {name} ({type(metric).__name__}) is updated in training_step, and its "
                f"state {attribute}",
                "has no reduction that can be carried on from step to step (sum, mean, max, min, "
                "cat); update it in validation, where every worker sees all batches",
            )


def _states(metric: Metric) -> dict[str, Any]:
    found = {attribute: getattr(metric, attribute) for attribute in metric._defaults}
    return {n: list(value) if isinstance(value, list) else value for n, value in found.items()}


def _put(metric: Metric, states: dict[str, Any], updates: int) -> None:
    for attribute, value in states.items():
        is_list = isinstance(value, list)
        setattr(metric, attribute, [v.clone() for v in value] if is_list else value.clone())
    metric._update_count, metric._computed = updates, None


def _given(value: Any, function: Any, part: float, reduction: Reduction) -> Result:
    """Give a state to the reduction. part: this rank's part of the step's samples."""
    if isinstance(value, list):
        return reduction.gather(value)
    if function is dim_zero_cat:
        gathered = reduction.gather([value])
        return lambda: torch.cat(gathered())
    if function is dim_zero_max:
        return reduction.maximum(value)
    if function is dim_zero_min:
        most = reduction.maximum(-value)
        return lambda: -most()
    return reduction.sum(value * part if function is dim_zero_mean else value)
