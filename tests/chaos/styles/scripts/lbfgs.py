"""L-BFGS on full batches: its step calls a closure, which averages gradients and loss, thrice."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks

SAMPLES = 16


def main(epochs: int) -> None:
    session = elastic.init()
    torch.manual_seed(0)
    model = session.distribute(nn.Linear(8, 1).double())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=3)
    session.track(model=model, optimizer=optimizer)
    dataset = tasks.regression(SAMPLES)
    data = elastic.DataLoader(dataset, batch_size=SAMPLES, global_batch=SAMPLES, seed=3)
    for step in session.steps(data, epochs=8 * epochs):
        with step:
            for inputs, targets in step.batches():

                def closure(
                    step: elastic.Step = step,
                    inputs: torch.Tensor = inputs,
                    targets: torch.Tensor = targets,
                ) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(inputs), targets)
                    step.backward(loss)
                    total = loss.detach() * len(inputs)
                    dist.all_reduce(total)
                    return total / SAMPLES

                optimizer.step(closure)
