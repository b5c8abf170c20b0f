"""Models compiled by torch.compile."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def compile_around(epochs: int) -> None:
    """torch.compile around the distributed model."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(compiled(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def compile_in_place(epochs: int) -> None:
    """The module compiled in place (`net.compile()`), with a foreach Adam."""
    session = elastic.init()
    net = tasks.net()
    net.compile(backend="eager")
    model = session.distribute(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, foreach=True)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


def compile_inside(epochs: int) -> None:
    """torch.compile of the module before it is distributed; session.warm_up compiles it."""
    session = elastic.init()
    model = session.distribute(torch.compile(tasks.net(), backend="aot_eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    inputs, targets = data.dataset[:4]
    session.warm_up(lambda: F.mse_loss(model(inputs), targets).backward())
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
