"""L-BFGS: the optimizer calls a closure several times, which averages gradients and loss."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net(hidden=4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    session.track(model=model, optimizer=optimizer)
    dataset = tasks.regression(samples=128)
    data = elastic.DataLoader(dataset, batch_size=16, global_batch=16, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():

                def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets):
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(inputs), targets)
                    step.backward(loss)  # noqa: B023 - called before the loop goes on
                    total = loss.detach() * len(inputs)
                    dist.all_reduce(total)
                    return total / 16

                optimizer.step(closure)
