"""Encoder and two heads in a ModuleDict, each distributed by itself, one optimizer for all."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    models = nn.ModuleDict(
        {
            "encoder": session.distribute(tasks.net(outputs=6)),
            "value": session.distribute(tasks.net(6, 8, 1)),
            "rank": session.distribute(tasks.net(6, 8, 1)),
        }
    )
    optimizer = torch.optim.AdamW(models.parameters(), lr=0.003)
    session.track(models=models, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                features = models["encoder"](inputs)
                value = F.mse_loss(models["value"](features), targets)
                rank = F.softplus(-models["rank"](features) * targets.sign()).mean()
                step.backward(value + rank)
            optimizer.step()
            optimizer.zero_grad()
