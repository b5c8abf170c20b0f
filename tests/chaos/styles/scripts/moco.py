"""Momentum contrast: forward moves a key encoder through `.data` and fills a queue of keys."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks

QUEUE = 32


@torch.no_grad()
def concat_all_gather(mine: torch.Tensor) -> torch.Tensor:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
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
        keys = concat_all_gather(keys)
        places = (self.pointer + torch.arange(len(keys))) % QUEUE
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


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(MoCo())
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.03, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(samples=64), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                logits = model(inputs, inputs + 0.1 * targets)
                labels = torch.zeros(len(logits), dtype=torch.int64)
                step.backward(F.cross_entropy(logits, labels))
            optimizer.step()
            optimizer.zero_grad()
