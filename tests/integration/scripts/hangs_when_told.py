"""Trains until it is stopped; when FOLDER/hang is there, rank 1 takes it away and hangs."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic

order = Path(sys.argv[1]) / "hang"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if session.rank == 1 and order.exists():
            order.unlink()
            time.sleep(3600)
        return self.layer(x)


session = elastic.init()
model = session.distribute(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(torch.zeros(100_000, 4), batch_size=2, seed=0)

for step in session.steps(data, epochs=100):
    with step:
        for x in step.batches():
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
