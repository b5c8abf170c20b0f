"""Forward through the bare module: nobody averages its gradients."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    net = tasks.net()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
