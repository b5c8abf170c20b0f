"""Representation learning: contrastive losses, target networks, teachers."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import elastic
from tests.chaos.styles import tasks


def byol(epochs: int) -> None:
    """BYOL: a target network outside of the distributed model, moved at the top of each step."""
    session = elastic.init()
    online = session.distribute(tasks.net(outputs=6))
    target = copy.deepcopy(online.module).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.03, momentum=0.9)
    session.track(online=online, target=target, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for theirs, ours in zip(target.parameters(), online.parameters(), strict=True):
                theirs.data.mul_(0.96).add_(ours.data, alpha=0.04)
            for inputs, targets in step.batches():
                predicted = F.normalize(online(inputs), dim=1)
                projected = F.normalize(target(inputs + 0.1 * targets), dim=1)
                step.backward(2 - 2 * (predicted * projected).sum(dim=1).mean())
            optimizer.step()
            optimizer.zero_grad()


def _gathered(mine: torch.Tensor) -> torch.Tensor:
    """Everyone's rows; workers may have different numbers of them."""
    own = torch.tensor([len(mine)], device=mine.device)
    sizes = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    most = int(max(sizes))
    padded = F.pad(mine, (0, 0, 0, most - len(mine)))
    return torch.cat([t[: int(n)] for t, n in zip(all_gather(padded), sizes, strict=True)])


def contrastive(epochs: int) -> None:
    """A contrastive loss over the whole batch: forward gathers the embeddings of all workers."""
    session = elastic.init()
    model = session.distribute(tasks.net(outputs=6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(samples=64), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                views = model(torch.cat([inputs, inputs + 0.1 * targets]))
                anchors, others = F.normalize(views, dim=1).chunk(2)
                similarity = anchors @ _gathered(others).T / 0.2
                positive = (anchors * others).sum(dim=1) / 0.2
                step.backward((similarity.logsumexp(dim=1) - positive).mean())
            optimizer.step()
            optimizer.zero_grad()


QUEUE = 32


@torch.no_grad()
def _concat_all_gather(mine: torch.Tensor) -> torch.Tensor:
    own = torch.tensor([len(mine)], device=mine.device)
    sizes = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    most = int(max(sizes))
    padded = F.pad(mine, (0, 0, 0, most - len(mine)))
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return torch.cat([r[: int(n)] for r, n in zip(rows, sizes, strict=True)])


class MoCo(nn.Module):
    def __init__(self, momentum: float = 0.95) -> None:
        super().__init__()
        self.momentum = momentum
        self.encoder_q = tasks.net(outputs=6)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        queue = torch.randn(QUEUE, 6, generator=torch.Generator().manual_seed(2)).double()
        self.register_buffer("queue", F.normalize(queue, dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def _update_key_encoder(self) -> None:
        pairs = zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)
        for query, key in pairs:
            key.data = key.data * self.momentum + query.data * (1.0 - self.momentum)

    @torch.no_grad()
    def _enqueue(self, keys: torch.Tensor) -> None:
        keys = _concat_all_gather(keys)
        places = (self.pointer + torch.arange(len(keys), device=keys.device)) % QUEUE
        self.queue[places] = keys
        self.pointer[0] = (self.pointer[0] + len(keys)) % QUEUE

    def forward(self, inputs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.encoder_q(inputs), dim=1)
        with torch.no_grad():
            self._update_key_encoder()
            key = F.normalize(self.encoder_k(others), dim=1)
        positive = (query * key).sum(dim=1, keepdim=True)
        negative = query @ self.queue.clone().detach().T
        self._enqueue(key)
        return torch.cat([positive, negative], dim=1) / 0.2


def moco(epochs: int) -> None:
    """Momentum contrast: forward moves a key encoder through `.data` and fills a queue of keys."""
    session = elastic.init()
    model = session.distribute(MoCo())
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.03, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(samples=64), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                logits = model(inputs, inputs + 0.1 * targets)
                labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
                step.backward(F.cross_entropy(logits, labels))
            optimizer.step()
            optimizer.zero_grad()


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


def distillation_recipe(epochs: int) -> None:
    """A recipe of many parts: a frozen teacher, mixup, stochastic depth, weight norm, activation
    checkpoints, an average as timm keeps it, parameter groups, a warm-up written by hand."""
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
