"""Two optimizers take turns: one trains the body in even steps, one the head in odd ones."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    net = tasks.net()
    model = session.distribute(net)
    body = torch.optim.Adam(net[0].parameters(), lr=0.005)
    head = torch.optim.SGD(net[2].parameters(), lr=0.05, momentum=0.9)
    session.track(model=model, body=body, head=head)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            (body if step.index % 2 == 0 else head).step()
            model.zero_grad()
