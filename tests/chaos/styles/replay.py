"""Computes what one process gets from a ledger's steps, if a style's batch follows the group."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from elastic.core.data_order import Permutation, epoch_key
from tests.chaos.styles import state, tasks

_SEED = 3  # of the scripts' DataLoader


def figures(
    style: str, steps: list[dict[str, int]], factors: dict[int, float]
) -> dict[str, dict[str, Any]]:
    """Figures of the model at the end. Both styles train the usual net by SGD with momentum.

    factors: those of the learning rate, by step.
    """
    scaled = style == "scaled_rate"
    model = tasks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs, targets = tasks.regression().tensors
    orders = {
        epoch: Permutation(len(inputs), key=epoch_key(_SEED, epoch))
        for epoch in {s["epoch"] for s in steps}
    }
    for record in steps:
        order = orders[record["epoch"]]
        chosen = [order[i] for i in range(record["start"], record["stop"])]
        optimizer.zero_grad()
        F.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.param_groups[0]["lr"] = 0.02 * (factors[record["step"]] if scaled else 1.0)
        optimizer.step()
    return {"model": state.figures(state.parts({"model": model})["model"])}
