"""Trains a model that torch.compile compiles."""

import torch
from torch import nn

import elastic

session = elastic.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = session.distribute(torch.compile(net))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)
numbers = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = elastic.DataLoader(torch.utils.data.TensorDataset(numbers), batch_size=4)

for step in session.steps(data, epochs=1):
    with step:
        for (inputs,) in step.batches():
            step.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if step.committed and session.rank == 0:
        print(f"step {session.committed}")
