"""After three epochs a head is added to what the optimizer trains."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    net = tasks.net()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        if step.epoch >= 3 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            model.zero_grad()
