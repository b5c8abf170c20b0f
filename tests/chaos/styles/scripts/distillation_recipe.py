"""A recipe of many parts: a frozen teacher, mixup, stochastic depth, weight norm, activation
checkpoints, an average as timm keeps it, parameter groups, a warm-up written by hand."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import elastic
from tests.chaos.styles import tasks


class Average(nn.Module):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        states = self.module.state_dict().values(), model.state_dict().values()
        for mine, theirs in zip(*states, strict=True):
            mine.copy_(self.decay * mine + (1.0 - self.decay) * theirs)


class Student(nn.Module):
    def __init__(self, depth: elastic.Session) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16).double(), nn.Linear(16, 1).double()
        self.block = weight_norm(nn.Linear(16, 16).double())
        self.depth = depth.generator("depth", kind="python")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if not self.training or self.depth.random() < 0.7:
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        return self.last(hidden)


class WarmUp:
    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer, self.steps, self.done = optimizer, steps, 0
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step(self) -> None:
        self.done += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * min(1.0, self.done / self.steps)

    def state_dict(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "optimizer"}

    def load_state_dict(self, state: dict) -> None:
        self.__dict__.update(state)


def main(epochs: int) -> None:
    session = elastic.init()
    teacher = tasks.net(hidden=32).eval().requires_grad_(False)
    model = session.distribute(Student(session), find_unused_parameters=True)
    average = Average(model, decay=0.9)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=0.003,
    )
    warm_up = WarmUp(optimizer, steps=50)
    mixup = session.generator("mixup", kind="numpy")
    session.track(model=model, optimizer=optimizer, average=average, warm_up=warm_up)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        model.train()
        with step:
            share = mixup.beta(0.4, 0.4)
            for inputs, targets in step.batches():
                inputs = share * inputs + (1.0 - share) * inputs.flip(1)
                outputs = model(inputs)
                with torch.no_grad():
                    soft = teacher(inputs)
                loss = F.mse_loss(outputs, targets) + 0.5 * F.smooth_l1_loss(outputs, soft)
                step.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            warm_up.step()
        average.update(model)
