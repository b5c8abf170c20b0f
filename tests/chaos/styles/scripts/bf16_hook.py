"""A hand-written hook that sends gradients as bf16 (torch's own is for GPUs)."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def bf16_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()

    def restored(done: torch.futures.Future) -> torch.Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return future.then(restored)


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    model.register_comm_hook(None, bf16_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.whole_numbers(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.l1_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
