"""The problem that the chaos tests train on, and its solution by one process from a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic.core.data_order import Permutation, epoch_key

SAMPLES = 301  # no multiple of a batch: epochs end with uneven and missing shares
SEED = 3


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs).sum(dim=1, keepdim=True)
    return TensorDataset(inputs, targets)


def build(seed: int) -> nn.Module:
    """Weights differ between workers until the group has synchronised them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, targets)


def solve(
    initial: dict[str, torch.Tensor], ledger: list[dict[str, Any]], factors: dict[int, float]
) -> dict[str, torch.Tensor]:
    """The weights after one process has taken the ledger's steps with the full batches."""
    model = build(0)
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = dataset().tensors
    orders = {e: Permutation(SAMPLES, key=epoch_key(SEED, e)) for e in {r["epoch"] for r in ledger}}
    for record in ledger:
        order = orders[record["epoch"]]
        chosen = [order[i] for i in range(record["start"], record["stop"])]
        loss_of(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.param_groups[0]["lr"] = 0.01 * factors[record["step"]]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def lineage(path: Path) -> list[dict[str, Any]]:
    """The surviving steps of a ledger file."""
    steps: list[dict[str, Any]] = []
    for record in map(json.loads, path.read_text().splitlines()):
        if "resume" in record:
            steps = [s for s in steps if s["step"] < record["resume"]]
        elif "step" in record:
            steps.append(record)
    return steps


def check_every_sample_once(steps: list[dict[str, Any]], epochs: int) -> None:
    """Check P3: steps are consecutive, and their ranges of samples tile every epoch."""
    assert [s["step"] for s in steps] == list(range(len(steps)))
    cursor, epoch = 0, 0
    for s in steps:
        if cursor == SAMPLES:
            cursor, epoch = 0, epoch + 1
        assert (s["epoch"], s["start"]) == (epoch, cursor), s
        assert s["stop"] > s["start"], s
        cursor = s["stop"]
    assert (epoch, cursor) == (epochs - 1, SAMPLES)
