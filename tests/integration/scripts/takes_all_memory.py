"""Trains; at step 30 one worker, once, takes memory until it is ended.

takes_all_memory.py MARK
"""

import os
import sys
from pathlib import Path

import torch

import elastic

session = elastic.init()
model = session.distribute(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 8)), batch_size=4, seed=0
)
mark = Path(sys.argv[1])

for step in session.steps(data, epochs=3):
    with step:
        for inputs, targets in step.batches():
            step.backward((model(inputs) - targets).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    if step.index == 30 and session.rank == 1 and not mark.exists():
        mark.touch()
        taken = []
        while True:
            taken.append(os.urandom(2**20) * 64)
