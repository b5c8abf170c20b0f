"""An average is made and tracked only when the third epoch begins: a worker that joins later takes
over the others' state before it has come to that line."""

import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    average = None
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        if step.epoch == 2 and average is None:
            average = AveragedModel(model.module)
            session.track(average=average)
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model.module)
