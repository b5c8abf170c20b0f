"""The distributed model sits inside of the module that the script trains and tracks."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class WithLoss(nn.Module):
    """Model and loss in one, with a count of its calls as a buffer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        smooth = 0.5 / (1.0 + 0.01 * float(self.steps))
        return F.smooth_l1_loss(self.model(inputs), targets, beta=smooth)


def main(epochs: int) -> None:
    session = elastic.init()
    trainer = WithLoss(session.distribute(tasks.net()))
    # A larger rate overshoots where the loss has its edge, and rounding grows with every step.
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.004, momentum=0.9)
    session.track(trainer=trainer, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(trainer(inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
