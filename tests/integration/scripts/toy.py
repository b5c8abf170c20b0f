"""What most scripts here train: a linear model on fixed random numbers. It prints each step."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic


class Toy:
    def __init__(
        self,
        *,
        samples=48,
        features=4,
        name="model",
        module=None,
        optimizer="SGD",
        lr=0.1,
        **options,
    ):
        self.session = elastic.init()
        torch.manual_seed(0)
        self.model = self.session.distribute(module or nn.Linear(features, 1))
        kind, more = (
            getattr(torch.optim, optimizer),
            {"momentum": 0.9} if optimizer == "SGD" else {},
        )
        self.optimizer = kind(self.model.parameters(), lr=lr, **more)
        self.session.track(**{name: self.model, "optimizer": self.optimizer})
        numbers = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
        options = {"batch_size": 4, "seed": 0, **options}
        self.data = elastic.DataLoader(TensorDataset(numbers), **options)

    def train(
        self,
        *,
        epochs=1,
        max_steps=None,
        pace_s=0.0,
        in_step=lambda _step: None,
        updated=lambda _step: None,
        below=lambda _committed: None,
    ):
        for step in self.session.steps(self.data, epochs=epochs, max_steps=max_steps):
            with step:
                time.sleep(pace_s)
                in_step(step)
                for (numbers,) in step.batches():
                    loss = self.model(numbers).square().mean()
                    step.backward(loss)
                    step.report(loss=loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                updated(step)
            if step.committed and self.session.rank == 0:
                print(f"step {self.session.committed}")
            if step.committed:
                below(self.session.committed)
