"""A hand-written average of the weights, updated after each committed step."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Ema:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for mine, theirs in zip(self.shadow.parameters(), model.parameters(), strict=True):
            mine.mul_(decay).add_(theirs, alpha=1 - decay)

    def state_dict(self) -> dict:
        return {"updates": self.updates, "shadow": self.shadow.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        self.shadow.load_state_dict(state["shadow"])


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    ema = Ema(model.module, decay=0.98)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer, ema=ema)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            ema.update(model.module)
            optimizer.zero_grad()
