"""Lookahead as an optimizer around Adam, whose own state_dict() has the state of both; a barrier
follows its step."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks
from tests.unit.worker.around_optimizer import Lookahead


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01), every=5)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad()
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            dist.barrier()
