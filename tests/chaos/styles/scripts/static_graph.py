"""DDP with static_graph, small buckets, and gradients that are views of them."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(
        tasks.net(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0005
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=2, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
