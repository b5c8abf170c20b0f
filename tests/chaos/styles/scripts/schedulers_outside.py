"""Schedulers step below the block, when the step has been committed."""

from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks
from tests.chaos.styles.every_scheduler import Ensemble, build


def main(epochs: int) -> None:
    session = elastic.init()
    ensemble = Ensemble()
    model = session.distribute(ensemble)
    optimizers, schedulers = build(ensemble)
    session.track(model=model, **optimizers, **schedulers)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        if step.committed:
            for scheduler in schedulers.values():
                scheduler.step()
