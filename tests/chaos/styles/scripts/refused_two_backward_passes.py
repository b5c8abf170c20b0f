"""Two losses of one forward pass, with a backward pass each: only the first is averaged."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net(outputs=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs)
                step.backward(F.mse_loss(outputs[:, :1], targets), retain_graph=True)
                step.backward(F.l1_loss(outputs[:, 1:], targets))
            optimizer.step()
            optimizer.zero_grad()
