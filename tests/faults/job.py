"""A short job whose weights do not depend on how many workers it has at which step."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import elastic
from tests.chaos.problem import build, dataset, loss_of

session = elastic.init()
model = session.distribute(build(0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(
    TensorDataset(*(tensor[:96] for tensor in dataset().tensors)), global_batch=8, seed=3
)
for step in session.steps(data, epochs=3):
    with step:
        time.sleep(0.01)
        for inputs, targets in step.batches():
            step.backward(loss_of(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
if session.rank == 0:
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    Path(sys.argv[1]).write_text(repr(weights.tolist()))
