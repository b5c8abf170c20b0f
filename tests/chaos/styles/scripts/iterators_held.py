"""Two phases, whose iterators have names: the first is left by `break`, with an evaluation below it
that decides the rate of the second."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def evaluate(model: nn.Module) -> float:
    inputs, targets = tasks.regression(20).tensors
    with torch.no_grad():
        return F.mse_loss(model(inputs), targets).item()


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    first = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    second = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=4)

    def train(step: elastic.Step) -> None:
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    warm_up = session.steps(first, epochs=epochs)
    for step in warm_up:
        train(step)
        if session.committed >= 16:
            break
    loss = session.run(evaluate, model)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1.0 + loss)
    steps = session.steps(second, epochs=epochs - 2)
    for step in steps:
        train(step)
    session.run(evaluate, model)
