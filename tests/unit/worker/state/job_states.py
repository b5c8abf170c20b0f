"""Builds states of jobs, and moves the state of one member to another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic.core.data_order import DataPosition
from elastic.core.learning_rate import Ramp
from elastic.core.worker.participation import Progress
from elastic.worker.state.backlog import LedgerRecord
from elastic.worker.state.job_state import JobState, progress_of
from elastic.worker.state.tree import same_tensor

RECORD = LedgerRecord(step=4, epoch=1, generation=2, world_size=3, start=0, stop=12)


def tracking(objects: dict[str, Any]) -> JobState:
    state = JobState()
    state.track(objects)
    return state


def make(seed: int, *, width: int = 3, steps: int = 1) -> JobState:
    """The state of a model, its optimizer and its scheduler after `steps` steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    state = tracking({"model": model, "optimizer": optimizer})
    state.track({"scheduler": scheduler})
    return state


PROGRESS = Progress(
    committed=5,
    committed_in=2,
    loop=1,
    positions=(DataPosition(epoch=2, cursor=0), DataPosition(epoch=1, cursor=12)),
    ramps={"0": Ramp(start_factor=1.0, end_factor=3.0, start_step=2, steps=9)},
)


@dataclass(frozen=True)
class At:
    """How far a job is, whose script uses its first loader."""

    here: Progress

    @property
    def position(self) -> DataPosition:
        return self.here.position(0)


def advanced(state: JobState) -> JobState:
    state.job = At(PROGRESS)
    state.ledger.append(RECORD)
    return state


def restore(target: JobState, source: JobState) -> None:
    """Restore `target` from `source`, through JSON and copies as over a network. What it has alike
    is not sent."""
    flat = source.capture()
    tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in flat.tensors.items()}
    for name, tensor in flat.tensors.items():
        tensors[name].copy_(tensor)  # row by row, whatever layout it had
    for name, live in target.comparable().items():
        if name in tensors and same_tensor(live, tensors[name]):
            tensors[name] = live
    extra = json.loads(json.dumps(source.extra()))
    target.restore(json.loads(json.dumps(flat.skeleton)), tensors, extra)
    target.job = At(progress_of(extra))
