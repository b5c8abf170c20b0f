"""Trains for ever, so that each metric of a job has a value: slot 2 is slow, one value is NaN."""

import time

import torch

import elastic

STEP_S = 0.05


class Model(torch.nn.Linear):
    def forward(self, values):
        time.sleep(STEP_S * (1.4 if session.local_rank == 2 else 1.0))
        return super().forward(values)


session = elastic.init()
model = session.distribute(Model(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(torch.utils.data.TensorDataset(torch.ones(1200, 4)), batch_size=4)
for step in session.steps(data, epochs=100_000):
    with step:
        for (batch,) in step.batches():
            loss = model(batch).square().mean()
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step.report(loss=loss, broken=float("nan"))
