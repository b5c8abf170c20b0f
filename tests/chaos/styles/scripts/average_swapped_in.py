"""Evaluates with averaged weights that it swaps in, and back without a `finally`."""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks

_TAKES_S = 0.06  # so that a worker may be lost meanwhile


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    average = tasks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, average=average, optimizer=optimizer)
    validation = tasks.regression(samples=90).tensors

    def evaluate() -> float:
        backup = [p.detach().clone() for p in model.parameters()]
        for mine, averaged in zip(model.parameters(), average.parameters(), strict=True):
            mine.data.copy_(averaged.data)
        session.state["evaluations"] = session.state.get("evaluations", 0) + 1
        inputs, targets = (t[session.rank :: session.world_size] for t in validation)
        with torch.no_grad():
            total = F.mse_loss(model.module(inputs), targets, reduction="sum")
        time.sleep(_TAKES_S)
        dist.all_reduce(total)
        for mine, kept in zip(model.parameters(), backup, strict=True):
            mine.data.copy_(kept)
        return total.item() / len(validation[0])

    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            for averaged, mine in zip(average.parameters(), model.parameters(), strict=True):
                averaged.data.lerp_(mine.data, 0.1)
        if step.committed and step.index % 2 == 1:
            session.run(evaluate)
