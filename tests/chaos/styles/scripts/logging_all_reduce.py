"""The loss is averaged for the log after the optimizer's step; scheduler and EMA follow."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=150)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average = loss.detach().clone()
            dist.all_reduce(average)
            average /= session.world_size
            step.report(loss=average)
            scheduler.step()
            ema.update_parameters(model.module)
