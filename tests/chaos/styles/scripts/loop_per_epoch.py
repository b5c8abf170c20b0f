"""A loop for each epoch, with what belongs between epochs between the loops."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    validation = tasks.regression(samples=90).tensors

    def evaluate() -> float:
        inputs, targets = (t[session.rank :: session.world_size] for t in validation)
        with torch.no_grad():
            total = F.mse_loss(model.module(inputs), targets, reduction="sum")
        dist.all_reduce(total)
        return total.item() / len(validation[0])

    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for epoch in range(epochs):
        for step in session.steps(data, epochs=epoch + 1):
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        loss = session.run(evaluate)
        if session.rank == 0:
            print(f"epoch {epoch}: {loss:.4f}")
