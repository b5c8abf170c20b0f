"""Gradients are scaled, clipped, or part of the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic
from tests.chaos.styles import tasks


def _dataset() -> TensorDataset:
    inputs, targets = tasks.whole_numbers().tensors
    inputs[5, 0] = inputs[40, 3] = float("inf")
    return TensorDataset(inputs, targets)


def grad_scaler(epochs: int) -> None:
    """Mixed precision in bf16 with a GradScaler; some samples are broken and overflow."""
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    scaler = torch.amp.GradScaler(session.device.type, init_scale=16.0, growth_interval=6)
    session.track(model=model, optimizer=optimizer, scaler=scaler)
    data = elastic.DataLoader(_dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad(set_to_none=True)
            for inputs, targets in step.batches():
                with torch.autocast(session.device.type, dtype=torch.bfloat16):
                    loss = F.l1_loss(model(inputs).float(), targets)
                step.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


def grad_scaler_two_optimizers(epochs: int) -> None:
    """A GradScaler for two optimizers; a figure is reduced between unscale_() and step()."""
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    weight = torch.optim.SGD([model.weight], lr=2**-6)
    bias = torch.optim.SGD([model.bias], lr=2**-5)
    scaler = torch.amp.GradScaler(session.device.type, init_scale=16.0, growth_interval=25)
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


def clipping(epochs: int) -> None:
    """Gradients are clipped by their norm, and some by value."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            nn.utils.clip_grad_value_(model.module[0].parameters(), 0.3)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


def gradient_penalty(epochs: int) -> None:
    """A penalty on the gradient with respect to the inputs: backward through a backward."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                inputs.requires_grad_(True)
                outputs = model(inputs)
                (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).pow(2).mean()
                step.backward(F.mse_loss(outputs, targets) + 0.1 * penalty)
            optimizer.step()
            optimizer.zero_grad()
