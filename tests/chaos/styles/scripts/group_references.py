"""The optimizer's groups and a list of `session.state` are kept in variables from the start on."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    net = tasks.net()
    model = session.distribute(net)
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    body, head = optimizer.param_groups
    history = session.state.setdefault("history", [])
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            body["lr"] = 0.02 * (1 - step.index / (8 * epochs + 1))
            head["lr"] = 0.02 / (1 + 0.1 * len(history))
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step.index % 5 == 0:
                history.append(step.index)
