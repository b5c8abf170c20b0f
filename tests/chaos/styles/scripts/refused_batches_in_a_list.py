"""All micro-batches are taken before the first loss: each would get the weight of the last."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=3, global_batch=29, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in list(step.batches()):
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
