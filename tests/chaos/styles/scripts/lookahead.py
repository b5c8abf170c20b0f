"""Lookahead around Adam: every fifth step the fast weights go back towards the slow ones."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Lookahead:
    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k:
            return
        fast = [p for g in self.optimizer.param_groups for p in g["params"]]
        for slow, parameter in zip(self.slow, fast, strict=True):
            slow.add_(parameter - slow, alpha=self.alpha)
            parameter.copy_(slow)

    def state_dict(self) -> dict:
        return {"count": self.count, "slow": self.slow}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        self.slow = [slow.clone() for slow in state["slow"]]


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = Lookahead(adam)
    session.track(model=model, adam=adam, lookahead=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            adam.zero_grad()
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
