"""Trains one step; then each worker makes a file in DIRECTORY and is busy with something else."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic

session = elastic.init()
model = session.distribute(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=2)

for step in session.steps(data, epochs=1):
    with step:
        for (inputs,) in step.batches():
            step.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    (Path(sys.argv[1]) / str(os.getpid())).touch()
    time.sleep(1000)
