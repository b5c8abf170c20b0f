"""Dropout and noise from torch's own generators, other ones on each worker."""

import os

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)).double()


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(net())
    torch.manual_seed(os.getpid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                noisy = inputs + 0.05 * torch.randn_like(inputs)
                step.backward(F.mse_loss(model(noisy), targets))
            optimizer.step()
            optimizer.zero_grad()
