"""Rank 0 alone evaluates, with the distributed model, whose buffers DDP would broadcast."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches += 1
        return self.net(inputs) * (1.0 + 0.5 / float(self.batches + 1))


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    validation = tasks.regression(samples=90).tensors[0].split(16)
    for step in session.steps(data, epochs=epochs):
        model.train()
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.ends_epoch and session.rank == 0:
            model.eval()
            with torch.no_grad():
                print(sum(float(model(inputs).sum()) for inputs in validation))
