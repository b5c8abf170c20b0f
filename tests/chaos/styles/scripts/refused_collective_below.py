"""The loss is averaged for a log below the block, where a newcomer would not come to it."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if session.rank == 0:
            print(total.item() / session.world_size)
