"""BYOL: a target network outside of the distributed model, moved at the top of each step."""

import copy

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    online = session.distribute(tasks.net(outputs=6))
    target = copy.deepcopy(online.module).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.03, momentum=0.9)
    session.track(online=online, target=target, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for theirs, ours in zip(target.parameters(), online.parameters(), strict=True):
                theirs.data.mul_(0.96).add_(ours.data, alpha=0.04)
            for inputs, targets in step.batches():
                predicted = F.normalize(online(inputs), dim=1)
                projected = F.normalize(target(inputs + 0.1 * targets), dim=1)
                step.backward(2 - 2 * (predicted * projected).sum(dim=1).mean())
            optimizer.step()
            optimizer.zero_grad()
