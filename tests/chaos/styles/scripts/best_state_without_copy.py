"""The best state is kept in session.state as state_dict() gives it, which follows the training; it
is loaded every now and then."""

import copy
import math

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    values = session.state
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                means = step.mean(loss=loss)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not step.committed:
            continue
        if means.loss < values.get("lowest", math.inf):
            values["lowest"], values["weights"] = means.loss, model.state_dict()
            values["optimizer"] = copy.deepcopy(optimizer.state_dict())
        elif step.index % 13 == 12:
            model.load_state_dict(values["weights"])
            optimizer.load_state_dict(values["optimizer"])
