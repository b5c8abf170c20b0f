"""Computes what one process gets from the steps of long_job.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic.core.data_order import Permutation, epoch_key
from tests.chaos.problem import build, dataset, loss_of

SAMPLES, BATCH, SEED = 96, 8, 3


def long_data() -> TensorDataset:
    return TensorDataset(*(tensor[:SAMPLES] for tensor in dataset().tensors))


def new_model() -> nn.Module:
    return build(0)


def fingerprint(model: nn.Module) -> float:
    """A number from all weights; weights that differ by more than rounding rarely share it."""
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return float(weights @ torch.cos(torch.arange(len(weights), dtype=weights.dtype)))


class Reference:
    """The fingerprint after each number of steps, computed on demand."""

    def __init__(self) -> None:
        self._model = new_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._inputs, self._targets = long_data().tensors
        self._known = [fingerprint(self._model)]

    def after(self, steps: int) -> float:
        while len(self._known) <= steps:
            self._take_step(len(self._known) - 1)
        return self._known[steps]

    def _take_step(self, step: int) -> None:
        epoch, batch = divmod(step, SAMPLES // BATCH)
        order = Permutation(SAMPLES, key=epoch_key(SEED, epoch))
        chosen = [order[i] for i in range(batch * BATCH, (batch + 1) * BATCH)]
        loss_of(self._model(self._inputs[chosen]), self._targets[chosen]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._known.append(fingerprint(self._model))
