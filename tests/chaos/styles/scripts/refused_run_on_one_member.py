"""Only rank 0 evaluates, with a function that has a collective in it."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def evaluate(model: torch.nn.Module) -> float:
    inputs, targets = tasks.regression(samples=90).tensors
    with torch.no_grad():
        loss = F.mse_loss(model.module(inputs), targets)
    dist.all_reduce(loss)
    return float(loss)


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if session.rank == 0 and step.index % 5 == 4:
            session.run(evaluate, model)
