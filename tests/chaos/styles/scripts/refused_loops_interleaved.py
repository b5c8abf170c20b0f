"""Two loops over the steps run side by side."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    first, second = (
        elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=seed)
        for seed in (3, 4)
    )
    loops = (session.steps(data, epochs=epochs) for data in (first, second))
    for pair in zip(*loops, strict=True):
        for step in pair:
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
