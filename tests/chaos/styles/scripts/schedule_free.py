"""A schedule-free optimizer: its train() and eval() exchange the weights around evaluations."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    share = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                    p.lerp_(self.state[p]["z"], share)
            group["train_mode"] = train

    def train(self) -> None:
        self._move(train=True)

    def eval(self) -> None:
        self._move(train=False)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            c = 1.0 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = ScheduleFree(model.parameters(), lr=0.05)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    validation = tasks.regression(samples=90).tensors
    for step in session.steps(data, epochs=epochs):
        optimizer.train()
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.ends_epoch:
            optimizer.eval()
            with torch.no_grad():
                print(F.mse_loss(model(validation[0]), validation[1]).item())
