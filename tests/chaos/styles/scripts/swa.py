"""Stochastic weight averaging over the second half of the epochs, with SWALR."""

import torch
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    averaged = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    swa_lr = SWALR(optimizer, swa_lr=0.005, anneal_epochs=20)
    session.track(model=model, averaged=averaged, optimizer=optimizer, cosine=cosine, swa=swa_lr)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step.epoch >= epochs // 2:
                averaged.update_parameters(model.module)
                swa_lr.step()
            else:
                cosine.step()
