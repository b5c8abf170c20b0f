"""Loops over the steps, and the places where scripts leave them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def plain_sgd(epochs: int) -> None:
    """SGD with momentum, and nothing else."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def fixed_number_of_steps(epochs: int) -> None:
    """Training lasts for a number of steps; the loop is left there, in the middle of an epoch."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=1_000):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if session.committed >= 8 * epochs - 3:
            break


def loop_per_epoch(epochs: int) -> None:
    """A loop for each epoch, with what belongs between epochs between the loops."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    validation = tasks.held_out(session.device)

    def evaluate() -> float:
        inputs, targets = (t[session.rank :: session.world_size] for t in validation)
        with torch.no_grad():
            total = F.mse_loss(model.module(inputs), targets, reduction="sum")
        dist.all_reduce(total)
        return total.item() / len(validation[0])

    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for epoch in range(epochs):
        for step in session.steps(data, epochs=epoch + 1):
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        loss = session.run(evaluate)
        if session.rank == 0:
            print(f"epoch {epoch}: {loss:.4f}")


def two_phases(epochs: int) -> None:
    """Pre-training on one dataset, then fine-tuning on another one with another optimizer."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    first = torch.optim.Adam(model.parameters(), lr=0.005)
    second = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    session.track(model=model, first=first, second=second)
    large = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    small = elastic.DataLoader(tasks.regression(40), batch_size=5, global_batch=5, seed=4)
    for step in session.steps(large, epochs=epochs // 2):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            first.step()
            first.zero_grad()
    for step in session.steps(small, epochs=epochs - epochs // 2):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.l1_loss(model(inputs), targets))
            second.step()
            second.zero_grad()


def _evaluate(model: nn.Module, session: elastic.Session) -> float:
    inputs, targets = tasks.held_out(session.device, samples=20)
    with torch.no_grad():
        return F.mse_loss(model(inputs), targets).item()


def iterators_held(epochs: int) -> None:
    """Two phases, whose iterators have names: the first is left by `break`, with an evaluation
    below it that decides the rate of the second."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    first = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    second = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=4)

    def train(step: elastic.Step) -> None:
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    warm_up = session.steps(first, epochs=epochs)
    for step in warm_up:
        train(step)
        if session.committed >= 16:
            break
    loss = session.run(_evaluate, model, session)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1.0 + loss)
    steps = session.steps(second, epochs=epochs - 2)
    for step in steps:
        train(step)
    session.run(_evaluate, model, session)


class Counted(nn.Module):
    """A net with a buffer, so that its forward pass has a collective too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(inputs)


def exceptions_caught(epochs: int) -> None:
    """A batch that fails is skipped: the script catches its error, even that of a lost group."""
    session = elastic.init()
    model = session.distribute(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad()
            try:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
            except RuntimeError as error:
                print(f"skipping a batch: {error}")
                continue
            optimizer.step()


def exceptions_caught_before_the_optimizer(epochs: int) -> None:
    """A batch that fails is skipped, but the optimizer steps all the same."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                try:
                    step.backward(F.mse_loss(model(inputs), targets))
                except RuntimeError as error:
                    print(f"skipping a batch: {error}")
            optimizer.step()
            optimizer.zero_grad()
