"""An evaluation over all workers every ten steps, in the loop; the best one is remembered."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Best:
    """The lowest validation loss so far, and when it was seen."""

    def __init__(self) -> None:
        self.loss, self.step = float("inf"), -1

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss, "step": self.step}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss, self.step = state["loss"], int(state["step"])


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    best = Best()
    session.track(model=model, optimizer=optimizer, best=best)
    validation = tasks.regression(samples=90).tensors

    def evaluate() -> float:
        inputs, targets = (t[session.rank :: session.world_size] for t in validation)
        model.eval()
        with torch.no_grad():
            total = F.mse_loss(model.module(inputs), targets, reduction="sum")
        model.train()
        dist.all_reduce(total)
        return total.item() / len(validation[0])

    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and step.index % 10 == 9:
            loss = session.run(evaluate)
            if loss < best.loss:
                best.loss, best.step = loss, step.index
