"""A large memory bank in an object inside of the tracked one, written before the backward pass in
some steps only."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Ring:
    def __init__(self) -> None:
        self.rows, self.written = torch.zeros(2000, 8, dtype=torch.float64), 0


class Bank:
    def __init__(self) -> None:
        self.ring = Ring()

    def add(self, row: torch.Tensor) -> None:
        self.ring.rows[self.ring.written % len(self.ring.rows)] = row
        self.ring.written += 1

    def mean(self) -> torch.Tensor:
        return self.ring.rows.sum(dim=0) / max(self.ring.written, 1)

    def state_dict(self) -> dict:
        return {"rows": self.ring.rows, "written": self.ring.written}

    def load_state_dict(self, state: dict) -> None:
        self.ring.rows.copy_(state["rows"])
        self.ring.written = state["written"]


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    bank = Bank()
    session.track(model=model, optimizer=optimizer, bank=bank)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            if step.index % 7 in (3, 5, 6):  # no power of two among the last two
                bank.add(torch.full((8,), float(step.index % 5), dtype=torch.float64))
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs + 0.1 * bank.mean()), targets))
            optimizer.step()
            optimizer.zero_grad()
