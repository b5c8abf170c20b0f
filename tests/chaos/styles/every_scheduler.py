"""A model whose parts are trained by optimizers of their own, one for each of torch's schedulers.

Not a script: those named schedulers_* use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr

SCHEDULERS: dict[str, Callable[[Optimizer], lr.LRScheduler]] = {
    "lambda_lr": lambda o: lr.LambdaLR(o, lambda n: 0.98**n),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda _: 0.99),
    "step_lr": lambda o: lr.StepLR(o, 20, gamma=0.7),
    "multi_step": lambda o: lr.MultiStepLR(o, [10, 30, 60], gamma=0.6),
    "constant": lambda o: lr.ConstantLR(o, factor=0.3, total_iters=25),
    "linear": lambda o: lr.LinearLR(o, start_factor=0.1, total_iters=50),
    "exponential": lambda o: lr.ExponentialLR(o, gamma=0.99),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=15), lr.CosineAnnealingLR(o, T_max=60)], [15]
    ),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=80),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, factor=0.5, total_iters=20), lr.ExponentialLR(o, gamma=0.99)]
    ),
    "cyclic": lambda o: lr.CyclicLR(o, base_lr=0.001, max_lr=0.02, step_size_up=15),
    "warm_restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=20, T_mult=2),
    "one_cycle": lambda o: lr.OneCycleLR(o, max_lr=0.02, total_steps=100_000),
    "polynomial": lambda o: lr.PolynomialLR(o, total_iters=100, power=2.0),
}


class Ensemble(nn.Module):
    """Regressors that have nothing to do with each other; the loss is that of their sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 1).double() for name in SCHEDULERS})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts.values()]).mean(dim=0)


def build(model: Ensemble) -> tuple[dict[str, Optimizer], dict[str, lr.LRScheduler]]:
    """Optimizers and schedulers by name."""
    optimizers: dict[str, Optimizer] = {
        f"optimizer_{name}": torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.8)
        for name, part in model.parts.items()
    }
    schedulers = {
        f"scheduler_{name}": make(optimizers[f"optimizer_{name}"])
        for name, make in SCHEDULERS.items()
    }
    return optimizers, schedulers
