"""Gradients of several micro-batches or several blocks make one step."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def accumulation(epochs: int) -> None:
    """A fixed global batch in micro-batches of one or two samples."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=2, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def token_means(epochs: int) -> None:
    """The loss is a mean over tokens, of which samples have none to three, and micro-batches none
    to six."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=2, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                tokens = (inputs[:, 0].abs() * 1000).long() % 4
                errors = F.mse_loss(model(inputs), targets, reduction="none").mean(dim=1)
                loss = (errors * tokens).sum() / tokens.sum().clamp(min=1)
                step.mean(loss=loss, weight=tokens.sum())
                step.backward(loss, weight=tokens.sum())
            optimizer.step()
            optimizer.zero_grad()


ACCUMULATE = 4


def accumulation_by_hand(epochs: int) -> None:
    """The optimizer steps every fourth time; until then gradients add up in `.grad`."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets) / ACCUMULATE)
            if (step.index + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()


def zero_grad_first(epochs: int) -> None:
    """Gradients are zeroed at the top of the block, not at its end, and in place."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad(set_to_none=False)
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()


def growing_batch(epochs: int) -> None:
    """The batch grows with the group, in two micro-batches of each worker; the rate stays."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=2, accumulate=2, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def scaled_rate(epochs: int) -> None:
    """The batch grows with the group and the learning rate with it, along a ramp."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.scale_lr(optimizer, elastic.LinearScaling(reference_world=2, warmup_steps=12))
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=3, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
