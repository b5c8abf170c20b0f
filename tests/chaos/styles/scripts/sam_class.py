"""SAM as an optimizer around another one, whose groups it shares, and a scheduler of its own."""

from typing import Any

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class SAM(torch.optim.Optimizer):
    """As it is passed from hand to hand."""

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


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.03, momentum=0.9)
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
