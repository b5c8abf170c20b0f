"""A contrastive loss over the whole batch: forward gathers the embeddings of all workers."""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def gathered(mine: torch.Tensor) -> torch.Tensor:
    """Everyone's rows; workers may have different numbers of them."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    most = int(max(sizes))
    padded = F.pad(mine, (0, 0, 0, most - len(mine)))
    return torch.cat([t[: int(n)] for t, n in zip(all_gather(padded), sizes, strict=True)])


def main(epochs: int) -> None:
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
                similarity = anchors @ gathered(others).T / 0.2
                positive = (anchors * others).sum(dim=1) / 0.2
                step.backward((similarity.logsumexp(dim=1) - positive).mean())
            optimizer.step()
            optimizer.zero_grad()
