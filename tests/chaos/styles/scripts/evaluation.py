"""Scripts that evaluate between steps and act on the result."""

import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def _evaluate(model: nn.Module, session: elastic.Session) -> float:
    """The mean squared error over a validation set, of which each worker takes its part."""
    inputs, targets = tasks.held_out(session.device)
    mine = slice(session.rank, None, session.world_size)
    with torch.no_grad():
        total = F.mse_loss(model.module(inputs[mine]), targets[mine], reduction="sum")
    dist.all_reduce(total)
    return float(total) / len(inputs)


def early_stopping(epochs: int) -> None:
    """Training stops as soon as the validation loss is good enough."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    rate = 0.24 / epochs * (12 / epochs) ** 0.25  # good enough after four fifths of the epochs
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        seldom = step.committed and step.index % 5 == 4
        if seldom and session.run(_evaluate, model, session) < 0.16:
            break


def evaluation_each_epoch_by_variable(epochs: int) -> None:
    """An evaluation once an epoch; a variable in session.state remembers the last such epoch."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    session.state["evaluated"] = 0
    for step in session.steps(data, epochs=epochs):
        if step.epoch > session.state["evaluated"]:
            session.state["evaluated"] = step.epoch
            session.state["validation"] = session.run(_evaluate, model, session)
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


class Best:
    """The lowest validation loss so far, and its step."""

    def __init__(self) -> None:
        self.loss, self.step = float("inf"), -1

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss, "step": self.step}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss, self.step = state["loss"], int(state["step"])


def evaluation_every_steps(epochs: int) -> None:
    """An evaluation over all workers every ten steps, in the loop; the best one is remembered."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    best = Best()
    session.track(model=model, optimizer=optimizer, best=best)
    validation = tasks.held_out(session.device)

    def evaluate() -> float:
        inputs, targets = (t[session.rank :: session.world_size] for t in validation)
        model.eval()
        with torch.no_grad():
            total = F.mse_loss(model.module(inputs), targets, reduction="sum")
        model.train()
        dist.all_reduce(total)
        return total.item() / len(validation[0])

    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and step.index % 10 == 9:
            loss = session.run(evaluate)
            if loss < best.loss:
                best.loss, best.step = loss, step.index


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches += 1
        return self.net(inputs) * (1.0 + 0.5 / float(self.batches + 1))


def evaluation_on_rank_zero(epochs: int) -> None:
    """Rank 0 alone evaluates, with the distributed model, whose buffers DDP would broadcast."""
    session = elastic.init()
    model = session.distribute(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    validation = tasks.held_out(session.device)[0].split(16)
    for step in session.steps(data, epochs=epochs):
        model.train()
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.ends_epoch and session.rank == 0:
            model.eval()
            with torch.no_grad():
                print(sum(float(model(inputs).sum()) for inputs in validation))


def plateau(epochs: int) -> None:
    """ReduceLROnPlateau follows an evaluation over all workers at the end of each epoch."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.6, patience=1)
    session.track(model=model, optimizer=optimizer, plateau=plateau)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and step.ends_epoch:
            plateau.step(round(session.run(_evaluate, model, session), 6))


def best_state_without_copy(epochs: int) -> None:
    """The best state is kept in session.state without a copy of state_dict(), so the weights in it
    follow the training. It is loaded every now and then."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    values = session.state
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                means = step.mean(loss=loss)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not step.committed:
            continue
        if means.loss < values.get("lowest", math.inf):
            values["lowest"], values["weights"] = means.loss, model.state_dict()
            values["optimizer"] = copy.deepcopy(optimizer.state_dict())
        elif step.index % 13 == 12:
            model.load_state_dict(values["weights"])
            optimizer.load_state_dict(values["optimizer"])
