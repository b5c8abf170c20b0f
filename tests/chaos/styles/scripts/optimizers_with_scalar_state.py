"""Optimizers with figures of their own in float32 beside weights in float64."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks

OPTIMIZERS = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=20),
}


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 1).double() for name in OPTIMIZERS})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts.values()])


def main(epochs: int) -> None:
    session = elastic.init()
    ensemble = Ensemble()
    model = session.distribute(ensemble)
    optimizers = {
        name: make(list(ensemble.parts[name].parameters())) for name, make in OPTIMIZERS.items()
    }
    session.track(model=model, **optimizers)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs)
                loss = F.mse_loss(outputs, targets.expand_as(outputs), reduction="none")
                step.backward(loss.sum(dim=0).mean())
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
