"""Sharpness-aware minimisation."""

from typing import Any

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class SAM(torch.optim.Optimizer):
    """Works like the one of github.com/davda54/sam."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack(
            [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        ).norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("use first_step and second_step")

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sam(epochs: int) -> None:
    """Sharpness-aware minimisation with the usual class: two passes, the first one perturbs."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer, base_optimizer=optimizer.base_optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
                optimizer.first_step(zero_grad=True)
                step.backward(F.mse_loss(model(inputs), targets))
                optimizer.second_step(zero_grad=True)


class SharingSAM(torch.optim.Optimizer):
    """A common version, which shares its parameter groups with the optimizer inside of it."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **named: Any) -> None:
        super().__init__(params, {"rho": 0.05, **named})
        self.base_optimizer = base(self.param_groups, **named)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.stack(gradients).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sam_class(epochs: int) -> None:
    """SAM as an optimizer around another one, whose groups it shares, and a scheduler on it."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    sam = SharingSAM(model.parameters(), torch.optim.SGD, lr=0.03, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sam, 10, 0.9)
    session.track(model=model, sam=sam, base=sam.base_optimizer, scheduler=scheduler)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
                sam.first_step()
                step.backward(F.mse_loss(model(inputs), targets))
            sam.second_step()
            scheduler.step()
