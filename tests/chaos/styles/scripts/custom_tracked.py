"""Inputs are normalised by running statistics over all workers, kept in a hand-written object."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class RunningStatistics:
    """Count, mean and squares of all samples seen, in NumPy."""

    def __init__(self, features: int) -> None:
        self.count = 0
        self.total, self.squares = np.zeros(features), np.zeros(features)
        self.seen_in_epoch: dict[str, int] = {}

    def update(self, inputs: torch.Tensor, epoch: int) -> None:
        rows = torch.tensor([float(len(inputs))], dtype=torch.float64)
        sums = torch.cat([rows, inputs.sum(dim=0), inputs.square().sum(dim=0)])
        dist.all_reduce(sums)
        count, total, squares = sums.numpy()[:1], sums.numpy()[1:9], sums.numpy()[9:]
        self.count += int(count[0])
        self.total += total
        self.squares += squares
        name = f"epoch {epoch}"
        self.seen_in_epoch[name] = self.seen_in_epoch.get(name, 0) + int(count[0])

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = self.total / self.count
        deviation = np.sqrt(np.maximum(self.squares / self.count - mean**2, 1e-6))
        return (inputs - torch.from_numpy(mean)) / torch.from_numpy(deviation)

    def state_dict(self) -> dict:
        return {
            "count": self.count,
            "total": torch.from_numpy(self.total.copy()),
            "squares": torch.from_numpy(self.squares.copy()),
            "seen_in_epoch": dict(self.seen_in_epoch),
        }

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        self.total, self.squares = state["total"].numpy().copy(), state["squares"].numpy().copy()
        self.seen_in_epoch = dict(state["seen_in_epoch"])


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    statistics = RunningStatistics(8)
    session.track(model=model, optimizer=optimizer, statistics=statistics)
    data = elastic.DataLoader(tasks.regression(samples=64), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                statistics.update(inputs, step.epoch)
                step.backward(F.mse_loss(model(statistics.normalise(inputs)), targets))
            optimizer.step()
            optimizer.zero_grad()
