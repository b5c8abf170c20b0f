"""A GradScaler for two optimizers; a figure is reduced between unscale_() and step()."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    weight = torch.optim.SGD([model.weight], lr=2**-6)
    bias = torch.optim.SGD([model.bias], lr=2**-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=25)
    session.track(model=model, weight=weight, bias=bias, scaler=scaler)
    data = elastic.DataLoader(tasks.whole_numbers(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(scaler.scale(F.l1_loss(model(inputs), targets)))
            scaler.unscale_(weight)
            scaler.unscale_(bias)
            norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            dist.all_reduce(norm)
            step.report(gradient_norm=norm / session.world_size)
            scaler.step(weight)
            scaler.step(bias)
            scaler.update()
            weight.zero_grad()
            bias.zero_grad()
