"""Trains a small head beside so many megabytes of frozen weights, which it changes in each step by
a little. In each of the first five steps one worker kills itself, at one place of the step or
another; not if the directory has a file `calm`.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

place, megabytes = Path(sys.argv[1]), int(sys.argv[2])
DIES_IN, STEPS, TENSOR = 5, 12, 2**18  # doubles: two megabytes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 1).double()
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.zeros(TENSOR, dtype=torch.float64), requires_grad=False)
            for _ in range(megabytes // 2)
        )

    def forward(self, numbers):
        return self.head(numbers) + sum(f[0] for f in self.frozen)


def dies(step, at):
    """Die at one of the places 0, 1, 2 of one of the first steps, one worker once for each."""
    if step.index >= DIES_IN or at != step.index % 3 or session.rank != session.world_size - 1:
        return
    with contextlib.suppress(FileExistsError):
        (place / f"died-{step.index}").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


session = elastic.init()
model = session.distribute(Net())
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
session.track(model=model, optimizer=optimizer)
numbers = torch.randn(STEPS * 12, 4, generator=torch.Generator().manual_seed(1)).double()
data = elastic.DataLoader(TensorDataset(numbers), batch_size=4, global_batch=12, seed=0)
may_die = not (place / "calm").exists()
for step in session.steps(data, max_steps=STEPS, epochs=None):
    with step:
        if may_die:
            dies(step, 0)
        for (batch,) in step.batches():
            step.backward(model(batch).square().mean())
            if may_die:
                dies(step, 1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(list(model.frozen), 2.0**-10)
        if may_die:
            dies(step, 2)
weights = [
    *model.head.parameters(),
    *(f[:8] for f in model.frozen),
    *(f[-8:] for f in model.frozen),
]
torch.save([w.detach() for w in weights], place / f"weights-{session.rank}.pt")
