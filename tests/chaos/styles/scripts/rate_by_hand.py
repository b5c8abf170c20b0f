"""The rate and the weight decay are set by hand from step.index, as in nanoGPT."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def rate(index: int, total: int) -> float:
    warm_up = 10
    if index < warm_up:
        return 0.02 * (index + 1) / warm_up
    return 0.001 + 0.01 * (1 + math.cos(math.pi * index / total))


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=4, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate(step.index, 8 * epochs)
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
