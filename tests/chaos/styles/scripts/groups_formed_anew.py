"""After three epochs the groups of the optimizer are cleared and formed anew, by name, with other
rates for body and head."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
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
