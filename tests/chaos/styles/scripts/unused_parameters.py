"""Two experts of which each step uses one: the other one's parameters get no gradient."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = tasks.net(outputs=16)
        self.experts = nn.ModuleList([tasks.net(16, 8, 1), tasks.net(16, 8, 1)])

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.stem(inputs))


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(Experts(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs, (step.index // 3) % 2)
                step.backward(F.mse_loss(outputs, targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
