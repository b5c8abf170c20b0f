"""PowerSGD; its rank is that of the gradients, so that what it leaves out is rounding only."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net(features=32, hidden=32))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=6, start_powerSGD_iter=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    dataset = tasks.regression(samples=32, features=32)
    data = elastic.DataLoader(dataset, batch_size=4, global_batch=4, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
