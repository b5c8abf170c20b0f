"""A generator of the script's own, tracked through a small object, decides each step's noise."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Tracked:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["state"])


def main(epochs: int) -> None:
    session = elastic.init()
    generator = torch.Generator().manual_seed(17)
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer, generator=Tracked(generator))
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            shift = 0.1 * torch.randn(8, generator=generator, dtype=torch.float64)
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs + shift), targets))
            optimizer.step()
            optimizer.zero_grad()
