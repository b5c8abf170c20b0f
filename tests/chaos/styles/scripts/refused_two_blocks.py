"""A step has two blocks: it would be committed twice."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        for _ in range(2):
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
