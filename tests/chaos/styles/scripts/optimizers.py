"""Optimizers of every kind."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import elastic
from tests.chaos.styles import tasks
from tests.unit.worker import around_optimizer

FUSED = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam_fused_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "tensor_rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
}


SCALAR_STATE = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=20),
}


class Ensemble(nn.Module):
    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: nn.Linear(8, 1).double() for name in names})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts.values()])


def fused_optimizers(epochs: int) -> None:
    """Fused and foreach implementations of the optimizers, one for each part of a model."""
    _train_parts(FUSED, epochs)


def optimizers_with_scalar_state(epochs: int) -> None:
    """Optimizers that keep scalars in float32 beside weights in float64."""
    _train_parts(SCALAR_STATE, epochs)


def _train_parts(makers: dict[str, Callable[[list[nn.Parameter]], Optimizer]], epochs: int) -> None:
    session = elastic.init()
    ensemble = Ensemble(makers)
    model = session.distribute(ensemble)
    optimizers = {
        name: make(list(ensemble.parts[name].parameters())) for name, make in makers.items()
    }
    session.track(model=model, **optimizers)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs)
                loss = F.mse_loss(outputs, targets.expand_as(outputs), reduction="none")
                step.backward(loss.sum(dim=0).mean())
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()


SAMPLES = 16


def lbfgs(epochs: int) -> None:
    """L-BFGS on full batches; its step calls a closure thrice, which averages gradient and loss."""
    session = elastic.init()
    torch.manual_seed(0)
    model = session.distribute(nn.Linear(8, 1).double())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=3)
    session.track(model=model, optimizer=optimizer)
    dataset = tasks.regression(SAMPLES)
    data = elastic.DataLoader(dataset, batch_size=SAMPLES, global_batch=SAMPLES, seed=3)
    for step in session.steps(data, epochs=8 * epochs):
        with step:
            for inputs, targets in step.batches():

                def closure(
                    step: elastic.Step = step,
                    inputs: torch.Tensor = inputs,
                    targets: torch.Tensor = targets,
                ) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(inputs), targets)
                    step.backward(loss)
                    total = loss.detach() * len(inputs)
                    dist.all_reduce(total)
                    return total / SAMPLES

                optimizer.step(closure)


class Lookahead:
    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k:
            return
        fast = [p for g in self.optimizer.param_groups for p in g["params"]]
        for slow, parameter in zip(self.slow, fast, strict=True):
            slow.add_(parameter - slow, alpha=self.alpha)
            parameter.copy_(slow)

    def state_dict(self) -> dict:
        return {"count": self.count, "slow": self.slow}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        self.slow = [slow.clone() for slow in state["slow"]]


def lookahead(epochs: int) -> None:
    """Lookahead around Adam: every fifth step the fast weights go back towards the slow ones."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = Lookahead(adam)
    session.track(model=model, adam=adam, lookahead=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            adam.zero_grad()
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()


def lookahead_optimizer(epochs: int) -> None:
    """Lookahead as an optimizer around Adam, whose own state_dict() has the state of both; a
    barrier follows its step."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = around_optimizer.Lookahead(adam, every=5)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer.zero_grad()
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            dist.barrier()


class ScheduleFree(Optimizer):
    def __init__(self, params, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    share = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                    p.lerp_(self.state[p]["z"], share)
            group["train_mode"] = train

    def train(self) -> None:
        self._move(train=True)

    def eval(self) -> None:
        self._move(train=False)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            c = 1.0 / group["k"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def schedule_free(epochs: int) -> None:
    """A schedule-free optimizer: its train() and eval() exchange the weights around evaluations."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = ScheduleFree(model.parameters(), lr=0.05)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    validation = tasks.held_out(session.device)
    for step in session.steps(data, epochs=epochs):
        optimizer.train()
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if step.ends_epoch:
            optimizer.eval()
            with torch.no_grad():
                print(F.mse_loss(model(validation[0]), validation[1]).item())


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8, sparse=True)
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(words).mean(dim=1)))


def sparse_embedding(epochs: int) -> None:
    """An embedding with sparse gradients and SparseAdam, beside a dense layer with its own Adam."""
    session = elastic.init()
    bag = Bag()
    model = session.distribute(bag)
    sparse = torch.optim.SparseAdam(list(bag.embedding.parameters()), lr=0.01)
    dense = torch.optim.Adam(bag.head.parameters(), lr=0.01)
    session.track(model=model, sparse=sparse, dense=dense)
    data = elastic.DataLoader(tasks.sentences(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for words, targets in step.batches():
                step.backward(F.mse_loss(model(words), targets))
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
