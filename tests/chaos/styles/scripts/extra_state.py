"""A module counts its calls in Python and keeps the count with get_extra_state()."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(inputs) * (1.0 + 0.5 / self.calls)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(Annealed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
