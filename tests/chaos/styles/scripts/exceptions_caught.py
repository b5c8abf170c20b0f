"""A batch that fails is skipped: the script catches what it raises, a lost group among it."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Counted(nn.Module):
    """With a buffer, so that its forward pass has a collective too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(inputs)


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad()
            try:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
            except RuntimeError as error:
                print(f"skipping a batch: {error}")
                continue
            optimizer.step()
