"""Modules that are more than their parameters."""

import os

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def _net_with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()


def batch_norm(epochs: int) -> None:
    """BatchNorm, with statistics over each worker's share."""
    session = elastic.init()
    model = session.distribute(_net_with_batch_norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


def _net_with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)).double()


def dropout(epochs: int) -> None:
    """Dropout and noise from torch's own generators, which differ between workers."""
    session = elastic.init()
    model = session.distribute(_net_with_dropout())
    torch.manual_seed(os.getpid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                noisy = inputs + 0.05 * torch.randn_like(inputs)
                step.backward(F.mse_loss(model(noisy), targets))
            optimizer.step()
            optimizer.zero_grad()


def dropout_off(epochs: int) -> None:
    """Dropout is switched off once, by eval() of its module, before the first step."""
    session = elastic.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(), nn.Linear(16, 1)).double()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        if step.index == 0:
            net[2].eval()
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(inputs) * (1.0 + 0.5 / self.calls)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def extra_state(epochs: int) -> None:
    """A module counts its calls in Python and keeps the count with get_extra_state()."""
    session = elastic.init()
    model = session.distribute(Annealed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


class Counting(nn.Module):
    """Its output shrinks with the number of calls and grows with its weights' average norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("norm", torch.ones((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
            with torch.no_grad():
                self.norm = 0.9 * self.norm + 0.1 * self.net[0].weight.norm()
        return self.net(inputs) * self.norm / (1 + 0.01 * self.calls)


def reassigned_buffers(epochs: int) -> None:
    """A module that assigns its buffers again in forward: `self.calls = self.calls + 1`."""
    session = elastic.init()
    model = session.distribute(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(40, 8), nn.Linear(8, 1)
        self.register_buffer("prototypes", torch.zeros(1, 8))
        self._grow(2)

    def _grow(self, length: int) -> None:
        self.longest = length
        angles = torch.outer(torch.arange(length).double(), 0.1 ** torch.arange(8).double())
        self.register_buffer("turns", angles.cos(), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if words.size(1) > self.longest:
            self._grow(words.size(1))
        turned = self.embed(words) * self.turns[: words.size(1)]
        return self.out(torch.tanh(turned.mean(dim=1) + self.prototypes.mean(dim=0)))


def growing_cache(epochs: int) -> None:
    """Rotary embeddings, whose cache is a buffer that is not saved and grows with the sequences;
    and a buffer of prototypes that is saved and grows, too."""
    session = elastic.init()
    net = Rotary().double()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.sentences(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        length = min(2 + step.index // 5, 6)
        with step:
            for words, targets in step.batches():
                step.backward(F.mse_loss(model(words[:, :length]), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step.index % 10 == 5:
                net.prototypes = torch.cat([net.prototypes, net.prototypes[-1:] + 0.1])


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(1)
        down = torch.randn(rank, base.in_features, generator=generator).double()
        self.down = nn.Parameter(0.3 * down)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def low_rank_adapters(epochs: int) -> None:
    """LoRA: the base is frozen for good, two small matrices beside it are trained."""
    session = elastic.init()
    net = tasks.net()
    net[0], net[2] = Adapted(net[0]), Adapted(net[2], rank=1)
    model = session.distribute(net)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 12)
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(words)).mean(dim=1)))


def tied_weights(epochs: int) -> None:
    """A small language model whose output layer shares its weight with the embedding."""
    session = elastic.init()
    model = session.distribute(Tied())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.sentences(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for words, _ in step.batches():
                step.backward(F.cross_entropy(model(words[:, :-1]), words[:, -1]))
            optimizer.step()
            optimizer.zero_grad()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = tasks.net(outputs=16)
        self.experts = nn.ModuleList([tasks.net(16, 8, 1), tasks.net(16, 8, 1)])

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.stem(inputs))


def unused_parameters(epochs: int) -> None:
    """Two experts of which each step uses one: the other one's parameters get no gradient."""
    session = elastic.init()
    model = session.distribute(Experts(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs, (step.index // 3) % 2)
                step.backward(F.mse_loss(outputs, targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def weights_differ_at_first(epochs: int) -> None:
    """Each worker uses another seed, so their weights differ until the group forms."""
    session = elastic.init()
    torch.manual_seed(os.getpid())
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


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


def wrapper_module(epochs: int) -> None:
    """The distributed model is inside of the module that the script trains and tracks."""
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


class Scaled(nn.Module):
    """Scales its outputs by an average norm, in a buffer that its first forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones_like(self.net[2].bias))
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * self.net[0].weight.norm())
        return self.net(inputs) * self.scale


def buffers_made_by_forward(epochs: int) -> None:
    """A module that registers its buffer in its first forward pass, and changes it in each."""
    session = elastic.init()
    model = session.distribute(Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)
