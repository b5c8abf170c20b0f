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
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)

from elastic.lightning.refusals import refuse
from elastic.worker.step import Step

_REDUCED = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
)
_MOST_DIMENSIONS = 8


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

    def reduce(self, all_reduce: Callable[..., Any]) -> None:
        """Count the step of all ranks, after the last micro-batch."""
        step, self._step = self._step, None
        if not self._before:
            return
        assert step is not None
        part = step.share / len(step.samples)
        for name in sorted(self._before):
            metric, (states, updates) = self.by_name[name], self._before[name]
            used_forward = metric._forward_cache is not None
            for attribute, function in metric._reductions.items():
                own = getattr(metric, attribute)
                setattr(metric, attribute, _reduced(own, function, part, all_reduce))
            metric._update_count, metric._computed = 1, None
            value = metric.compute() if used_forward else None
            metric._update_count = updates + 1
            if updates:
                metric._reduce_states(states)
            metric._computed, metric._forward_cache = None, value
        for collection in self._collections:
            if collection._groups_checked:  # metrics that share states refer to those of one
                collection._state_is_copy = False
                collection._compute_groups_create_state_ref()

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


def _reduced(
    value: Any, function: Any, part: float, all_reduce: Callable[..., Any]
) -> torch.Tensor | list[torch.Tensor]:
    """The state over all ranks. part: this rank's part of the step's samples."""
    if isinstance(value, list):
        return _gathered(value)
    if function is dim_zero_cat:
        return torch.cat(_gathered([value]))
    result: torch.Tensor = value.clone().contiguous()
    if function is dim_zero_mean:
        result = result * part
    kinds = {dim_zero_max: dist.ReduceOp.MAX, dim_zero_min: dist.ReduceOp.MIN}
    all_reduce(result, op=kinds.get(function, dist.ReduceOp.SUM))
    return result


def _gathered(own: list[torch.Tensor]) -> list[torch.Tensor]:
    """All ranks' tensors along their first dimension, by rank; those without any are left out."""
    world = dist.get_world_size()
    mine = torch.cat([each.reshape(each.shape or (1,)) for each in own]) if own else None
    device = torch.device("cpu") if mine is None else mine.device
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    form = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    data = torch.zeros(0, dtype=torch.uint8, device=device)
    if mine is not None:
        shape = [_DTYPES.index(mine.dtype), mine.dim(), *mine.shape]
        form[: len(shape)] = torch.tensor(shape)
        data = mine.contiguous().reshape(-1).view(torch.uint8)
    forms = [torch.empty_like(form) for _ in range(world)]
    dist.all_gather(forms, form)
    plain = [(_DTYPES[f[0]], f[2 : 2 + f[1]]) for f in (each.tolist() for each in forms)]
    sizes = [_bytes_of(dtype, shape) for dtype, shape in plain]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    gathered = [torch.empty_like(padded) for _ in range(world)]
    if max(sizes):
        dist.all_gather(gathered, padded)
    return [
        content[:size].view(dtype).reshape(shape)
        for content, size, (dtype, shape) in zip(gathered, sizes, plain, strict=True)
        if size
    ]


def _bytes_of(dtype: torch.dtype, shape: list[int]) -> int:
    count = dtype.itemsize if shape else 0
    for length in shape:
        count *= length
    return count
