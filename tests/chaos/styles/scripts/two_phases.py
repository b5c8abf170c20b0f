"""Pre-training on one dataset, then fine-tuning on another one with another optimizer."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    first = torch.optim.Adam(model.parameters(), lr=0.005)
    second = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    session.track(model=model, first=first, second=second)
    large = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    small = elastic.DataLoader(tasks.regression(40), batch_size=5, global_batch=5, seed=4)
    for step in session.steps(large, epochs=epochs // 2):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            first.step()
            first.zero_grad()
    for step in session.steps(small, epochs=epochs - epochs // 2):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.l1_loss(model(inputs), targets))
            second.step()
            second.zero_grad()
