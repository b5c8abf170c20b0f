"""A penalty on the gradient with respect to the inputs: backward through a backward."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                inputs.requires_grad_(True)
                outputs = model(inputs)
                (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).pow(2).mean()
                step.backward(F.mse_loss(outputs, targets) + 0.1 * penalty)
            optimizer.step()
            optimizer.zero_grad()
