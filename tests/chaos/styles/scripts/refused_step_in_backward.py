"""Each parameter has an optimizer that steps as soon as its gradient is there, before it is
averaged: memory is saved so on one device."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizers = {p: torch.optim.SGD([p], lr=0.02, momentum=0.9) for p in model.parameters()}
    session.track(model=model, **{f"sgd{i}": o for i, o in enumerate(optimizers.values())})

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
