"""Each step draws a feature mask, a mixing factor and a choice, the same on all workers."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    masks = session.generator("masks", kind="torch")
    mixing = session.generator("mixing", kind="numpy")
    choices = session.generator("choices", kind="python")
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            keep = torch.rand(8, generator=masks) > 0.1
            factor = float(mixing.beta(4.0, 1.0))
            sign = choices.choice([-1.0, 1.0])
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs * keep), factor * targets))
                step.backward(F.mse_loss(model(inputs * sign), targets * sign))
            optimizer.step()
            optimizer.zero_grad()
