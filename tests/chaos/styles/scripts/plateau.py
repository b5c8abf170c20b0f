"""ReduceLROnPlateau follows an evaluation over all workers at the end of each epoch."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def evaluate(model: torch.nn.Module, session: elastic.Session) -> float:
    """The mean squared error over a validation set, of which each worker takes its part."""
    inputs, targets = tasks.regression(samples=90).tensors
    mine = slice(session.rank, None, session.world_size)
    with torch.no_grad():
        total = F.mse_loss(model.module(inputs[mine]), targets[mine], reduction="sum")
    dist.all_reduce(total)
    return float(total) / len(inputs)


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.6, patience=1)
    session.track(model=model, optimizer=optimizer, plateau=plateau)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and step.ends_epoch:
            plateau.step(round(session.run(evaluate, model, session), 6))
