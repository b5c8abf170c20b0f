"""Optimizers whose parameters change during training, or whose groups the script holds."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def alternating_optimizers(epochs: int) -> None:
    """Two optimizers take turns: one trains the body in even steps, one the head in odd ones."""
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


def new_parameter_group(epochs: int) -> None:
    """After three epochs a head is added to what the optimizer trains."""
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


def groups_formed_anew(epochs: int) -> None:
    """After three epochs the optimizer's groups are cleared and built again, by name, with other
    rates for body and head."""
    session = elastic.init()
    net = tasks.net()
    model = session.distribute(net)
    optimizer = torch.optim.Adam(net.named_parameters(), lr=0.01)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        if step.index == 24:
            optimizer.param_groups.clear()
            for layer, rate in (("2", 0.01), ("0", 0.001)):
                named = net.get_submodule(layer).named_parameters(layer)
                optimizer.add_param_group({"params": list(named), "lr": rate})
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def group_references(epochs: int) -> None:
    """The optimizer's groups and a list of `session.state` are kept in variables from the start."""
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


def unfreezing(epochs: int) -> None:
    """The body is frozen for four epochs, then trained as well."""
    session = elastic.init()
    net = tasks.net()
    net[0].requires_grad_(False)
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        if step.epoch >= 4:
            net[0].requires_grad_(True)
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
