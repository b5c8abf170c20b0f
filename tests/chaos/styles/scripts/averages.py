"""Scripts that average weights."""

import copy
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import elastic
from tests.chaos.styles import tasks


class Ema:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for mine, theirs in zip(self.shadow.parameters(), model.parameters(), strict=True):
            mine.mul_(decay).add_(theirs, alpha=1 - decay)

    def state_dict(self) -> dict:
        return {"updates": self.updates, "shadow": self.shadow.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        self.shadow.load_state_dict(state["shadow"])


def ema_by_hand(epochs: int) -> None:
    """A hand-written average of the weights, updated after each committed step."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    ema = Ema(model.module, decay=0.98)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer, ema=ema)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            ema.update(model.module)
            optimizer.zero_grad()


def ema_of_bare_module(epochs: int) -> None:
    """An average of the weights: AveragedModel of model.module."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer, ema=ema)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model.module)


def ema_of_distributed_model(epochs: int) -> None:
    """An average of the weights: AveragedModel of what session.distribute returned."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer, ema=ema)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)


def swa(epochs: int) -> None:
    """Stochastic weight averaging over the second half of the epochs, with SWALR."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    averaged = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    swa_lr = SWALR(optimizer, swa_lr=0.005, anneal_epochs=20)
    session.track(model=model, averaged=averaged, optimizer=optimizer, cosine=cosine, swa=swa_lr)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step.epoch >= epochs // 2:
                averaged.update_parameters(model.module)
                swa_lr.step()
            else:
                cosine.step()


_TAKES_S = 0.06  # so that a worker may be lost during it


def average_swapped_in(epochs: int) -> None:
    """Averaged weights are swapped in for an evaluation, and back out without a `finally`."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    average = tasks.net().to(session.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, average=average, optimizer=optimizer)
    validation = tasks.held_out(session.device)

    def evaluate() -> float:
        backup = [p.detach().clone() for p in model.parameters()]
        for mine, averaged in zip(model.parameters(), average.parameters(), strict=True):
            mine.data.copy_(averaged.data)
        session.state["evaluations"] = session.state.get("evaluations", 0) + 1
        inputs, targets = (t[session.rank :: session.world_size] for t in validation)
        with torch.no_grad():
            total = F.mse_loss(model.module(inputs), targets, reduction="sum")
        time.sleep(_TAKES_S)
        dist.all_reduce(total)
        for mine, kept in zip(model.parameters(), backup, strict=True):
            mine.data.copy_(kept)
        return total.item() / len(validation[0])

    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            for averaged, mine in zip(average.parameters(), model.parameters(), strict=True):
                averaged.data.lerp_(mine.data, 0.1)
        if step.committed and step.index % 2 == 1:
            session.run(evaluate)
