"""A module that assigns its buffers anew in forward: `self.calls = self.calls + 1`."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Counting(nn.Module):
    """Its output shrinks with the number of calls and grows with its weights' average norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("norm", torch.ones((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
            with torch.no_grad():
                self.norm = 0.9 * self.norm + 0.1 * self.net[0].weight.norm()
        return self.net(inputs) * self.norm / (1 + 0.01 * self.calls)


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
