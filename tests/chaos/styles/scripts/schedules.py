"""Learning rates that change with the steps."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr

import elastic
from tests.chaos.styles import tasks

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
    """Independent regressors; the output is their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 1).double() for name in SCHEDULERS})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts.values()]).mean(dim=0)


def _ensemble(
    session: elastic.Session,
) -> tuple[nn.Module, dict[str, Optimizer], dict[str, lr.LRScheduler]]:
    """A model whose parts are trained by optimizers of their own, one for each of torch's
    schedulers; optimizers and schedulers by name."""
    ensemble = Ensemble()
    model = session.distribute(ensemble)
    optimizers: dict[str, Optimizer] = {
        f"optimizer_{name}": torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.8)
        for name, part in ensemble.parts.items()
    }
    schedulers = {
        f"scheduler_{name}": make(optimizers[f"optimizer_{name}"])
        for name, make in SCHEDULERS.items()
    }
    session.track(model=model, **optimizers, **schedulers)
    return model, optimizers, schedulers


def schedulers_top(epochs: int) -> None:
    """Schedulers step at the top of the block."""
    session = elastic.init()
    model, optimizers, schedulers = _ensemble(session)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            if step.index > 0:
                for scheduler in schedulers.values():
                    scheduler.step()
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()


def schedulers_bottom(epochs: int) -> None:
    """Schedulers step at the end of the block."""
    session = elastic.init()
    model, optimizers, schedulers = _ensemble(session)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers.values():
                scheduler.step()


def schedulers_each_epoch(epochs: int) -> None:
    """Schedulers step once an epoch, in the block of its last step."""
    session = elastic.init()
    model, optimizers, schedulers = _ensemble(session)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            if step.ends_epoch:
                for scheduler in schedulers.values():
                    scheduler.step()


def schedulers_outside(epochs: int) -> None:
    """Schedulers step below the block, when the step has been committed."""
    session = elastic.init()
    model, optimizers, schedulers = _ensemble(session)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        if step.committed:
            for scheduler in schedulers.values():
                scheduler.step()


def schedulers_loop_per_epoch(epochs: int) -> None:
    """One loop for each epoch; schedulers step between the loops, as in most tutorials."""
    session = elastic.init()
    model, optimizers, schedulers = _ensemble(session)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for epoch in range(epochs):
        for step in session.steps(data, epochs=epoch + 1):
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
        for scheduler in schedulers.values():
            scheduler.step()


def _rate(index: int, total: int) -> float:
    warm_up = 10
    if index < warm_up:
        return 0.02 * (index + 1) / warm_up
    return 0.001 + 0.01 * (1 + math.cos(math.pi * index / total))


def rate_by_hand(epochs: int) -> None:
    """The rate and the weight decay are set by hand from step.index, as in nanoGPT."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=4, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step.index, 8 * epochs)
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
