"""Mixed precision in bf16 with a GradScaler; some samples are broken and overflow."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic
from tests.chaos.styles import tasks


def dataset() -> TensorDataset:
    inputs, targets = tasks.whole_numbers().tensors
    inputs[5, 0] = inputs[40, 3] = float("inf")
    return TensorDataset(inputs, targets)


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=6)
    session.track(model=model, optimizer=optimizer, scaler=scaler)
    data = elastic.DataLoader(dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad(set_to_none=True)
            for inputs, targets in step.batches():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.l1_loss(model(inputs).float(), targets)
                step.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
