"""Loss and error over the global batch, from step.mean; their history decides the rate."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class History:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict) -> None:
        self.losses = list(state["losses"])


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    history = History()
    session.track(model=model, optimizer=optimizer, history=history)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs)
                loss = F.mse_loss(outputs, targets)
                figures = step.mean(loss=loss, error=(outputs - targets).abs().mean())
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            history.losses.append(figures.loss + figures["error"])
            if len(history.losses) == 20:
                optimizer.param_groups[0]["lr"] = 0.01 / (1.0 + history.losses[-1])
                history.losses.clear()
