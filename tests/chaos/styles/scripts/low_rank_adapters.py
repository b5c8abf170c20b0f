"""LoRA: the base is frozen for good, two small matrices beside it are trained."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        down = torch.randn(rank, base.in_features, generator=generator).double()
        self.down = nn.Parameter(0.3 * down)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def main(epochs: int) -> None:
    session = elastic.init()
    net = tasks.net()
    net[0], net[2] = Adapted(net[0]), Adapted(net[2], rank=1)
    model = session.distribute(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
