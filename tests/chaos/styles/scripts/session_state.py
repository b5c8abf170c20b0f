"""Counters and the best loss live in session.state; some are changed before the backward."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    session.state.setdefault("begun", 0)
    session.state.setdefault("epochs", [])
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            session.state["begun"] += 1
            rate = 0.02 / (1.0 + 0.01 * session.state["begun"])
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for group in optimizer.param_groups:
                group["lr"] = rate / (1 + len(session.state["epochs"]))
            optimizer.step()
            optimizer.zero_grad()
            if step.ends_epoch:
                session.state["epochs"] = [*session.state["epochs"], step.epoch][-3:]
