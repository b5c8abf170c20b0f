"""Fused and foreach implementations of the optimizers, one for each part of a model."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks

OPTIMIZERS = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam_fused_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "tensor_rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
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
