"""What a module logs in a step, over the whole group: each step counts once, by its samples.

Lightning sums up on each rank what `self.log` gets, and reduces at an epoch's end. The part of a
worker that was lost would be missing then, and what a retry logs would count twice. So the values
of a step are reduced in its block, and every rank counts those of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)

from elastic.lightning.reduction import Reduction, Result
from elastic.worker.step import Step

_FIELDS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
"""Of a value's metadata: what is plain. Its reduction and its rank_zero_only are apart."""


@dataclass(slots=True)
class _Logged:
    """What this rank has logged under one key in a step."""

    total: torch.Tensor
    weight: float
    extreme: int
    """1: the greatest counts, -1: the least. 0: `total` is a sum."""
    dtype: torch.dtype


class GroupResults(_ResultCollection):
    """The training loop's results, which take the group's values at the end of each step's block.

    reduce_fn: what Lightning gives as the function that reduces over devices. It is never called,
    and part of what a value's metadata are compared by.
    """

    def __init__(self, reduce_fn: Callable[..., Any], device: torch.device) -> None:
        super().__init__(training=True)
        self._reduce_fn, self._device = reduce_fn, device
        self._step: Step | None = None
        """The step whose values are collected."""
        self._logged: dict[str, _Logged] = {}
        self._of_metrics: set[str] = set()
        self._losses: list[tuple[torch.Tensor, int]] = []
        self._reduced_loss: tuple[Result, Result]
        self._reduced: dict[str, tuple[Result, Result | None]] = {}
        self.loss = 0.0
        """The mean loss of the last step."""

    def begin(self, step: Step) -> None:
        """A step's block has begun."""
        self._step = step
        self._logged.clear()
        self._of_metrics.clear()
        self._losses.clear()

    def give_up(self) -> None:
        """The block does not count."""
        self._step = None

    def next_batch(self, batch: Any) -> None:
        """The step's next micro-batch comes: values are weighted by its size."""
        self.batch, self.batch_size = batch, None

    def add_loss(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch is known."""
        assert self._step is not None
        if self._step.counts:
            self._losses.append((loss.detach(), len(self._step.positions)))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Take a value that the module or a callback logs."""
        step = self._step
        if step is None:
            super().update_metrics(key, value, batch_size)
        elif not isinstance(value, torch.Tensor):
            super().update_metrics(key, value, batch_size)
            self._of_metrics.add(key)
        else:
            self._collect(key, value, batch_size, counts=step.counts)

    def collect(self, reduction: Reduction) -> None:
        """Give the step's values to the reduction, after the last micro-batch and before the
        optimizer steps: what is logged later is equal on all ranks."""
        self._step = None
        loss = sum(
            (value.double() * samples for value, samples in self._losses),
            torch.zeros((), device=self._device),
        )
        samples = sum(samples for _, samples in self._losses)
        self._reduced_loss = reduction.sum(loss), reduction.sum(float(samples))
        self._reduced = {}
        for key in sorted(self._logged):
            logged = self._logged[key]
            if logged.extreme:
                self._reduced[key] = reduction.maximum(logged.total * logged.extreme), None
            else:
                self._reduced[key] = reduction.sum(logged.total), reduction.sum(logged.weight)

    def take(self) -> None:
        """Count the step's values of all ranks. The metrics that were logged have taken theirs."""
        loss, samples = self._reduced_loss
        self.loss = float(loss()) / float(samples())
        for key, (total, weight) in self._reduced.items():
            logged, is_mean = self._logged[key], self[key].meta.is_mean_reduction
            value, weighs = float(total()), 1.0
            if weight is None:
                value *= logged.extreme
            elif is_mean:
                weighs = float(weight())
                value = value / weighs if weighs else 0.0
            tensor = torch.tensor(value, dtype=logged.dtype, device=logged.total.device)
            super().update_metrics(key, tensor, round(weighs))
        for key in self._of_metrics:
            self[key]._forward_cache = self[key].value._forward_cache

    # ---- as a part of the tracked state

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far, in plain types."""
        return {key: _state_of(metric) for key, metric in self.items()} | {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any], metrics: dict[str, Any]) -> None:
        """Take over values. metrics: those of the module, by name."""
        self.loss = state["loss"]
        for key in [key for key in self if key not in state]:
            del self[key]
        for key, of in state.items():
            if key == "loss":
                continue
            if key not in self:
                self[key] = _ResultMetric(_metadata(of["meta"], self._reduce_fn), of["is_tensor"])
            _load(self[key], of, metrics)

    # ---- inside

    def _collect(self, key: str, value: torch.Tensor, batch_size: int, *, counts: bool) -> None:
        meta = self[key].meta
        extreme = meta.is_max_reduction - meta.is_min_reduction
        if key not in self._logged:
            dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
            empty = torch.full((), -torch.inf * extreme if extreme else 0.0)
            self._logged[key] = _Logged(empty.double().to(value.device), 0.0, extreme, dtype)
        self[key].has_reset = False
        if not counts:
            return
        logged, value = self._logged[key], value.double()
        if extreme:
            logged.total = meta.reduce_fx(logged.total, value)
        elif meta.is_mean_reduction:
            logged.total = logged.total + value * batch_size
            logged.weight += batch_size
        else:
            logged.total = logged.total + value


def _state_of(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    of: dict[str, Any] = {
        "meta": [
            *(getattr(meta, name) for name in _FIELDS),
            meta.reduce_fx.__name__,
            meta.sync.rank_zero_only,
        ],
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
        "is_updated": metric._update_count > 0,  # how often depends on this rank's micro-batches
        "cache": metric._forward_cache,
    }
    if metric.is_tensor:
        of["value"] = metric.value
        if meta.is_mean_reduction:
            of["samples"] = metric.cumulated_batch_size
    return of


def _load(metric: Any, of: dict[str, Any], metrics: dict[str, Any]) -> None:
    metric.has_reset = of["has_reset"]
    metric._update_count = int(of["is_updated"])
    metric._forward_cache = of["cache"]
    metric._computed = None
    if not of["is_tensor"]:
        metric.value = metrics.get(metric.meta.metric_attribute)
        return
    metric.value = of["value"].clone()
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = of["samples"].clone()


def _metadata(plain: list[Any], reduce_fn: Callable[..., Any]) -> _Metadata:
    *fields, reduction, rank_zero_only = plain
    meta = _Metadata(**dict(zip(_FIELDS, fields, strict=True)), reduce_fx=getattr(torch, reduction))
    meta.sync = _Sync(_should=False, fn=reduce_fn, rank_zero_only=rank_zero_only)
    return meta
