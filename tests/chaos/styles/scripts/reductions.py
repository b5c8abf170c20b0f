"""Other ways to reduce gradients, and collectives of the script's own."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic
from tests.chaos.styles import tasks


def fp16_hook(epochs: int) -> None:
    """DDP's hook that sends gradients as fp16."""
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.whole_numbers(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.l1_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def _bf16_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()

    def restored(done: torch.futures.Future) -> torch.Tensor:
        return bucket.buffer().copy_(done.value()[0])

    return future.then(restored)


def bf16_hook(epochs: int) -> None:
    """A hand-written hook that sends gradients as bf16 (torch's own is for GPUs)."""
    session = elastic.init()
    model = session.distribute(tasks.exact_net())
    model.register_comm_hook(None, _bf16_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.whole_numbers(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.l1_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def power_sgd_hook(epochs: int) -> None:
    """PowerSGD; its rank is that of the gradients, so that what it leaves out is rounding only."""
    session = elastic.init()
    model = session.distribute(tasks.net(features=32, hidden=32))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=6, start_powerSGD_iter=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    dataset = tasks.regression(samples=32, features=32)
    data = elastic.DataLoader(dataset, batch_size=4, global_batch=4, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def static_graph(epochs: int) -> None:
    """DDP with static_graph, small buckets, and gradients that are views of them."""
    session = elastic.init()
    model = session.distribute(
        tasks.net(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0005
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=2, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def logging_all_reduce(epochs: int) -> None:
    """The loss is averaged for the log after the optimizer's step; scheduler and EMA follow."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=150)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average = loss.detach().clone()
            dist.all_reduce(average)
            average /= session.world_size
            step.report(loss=average)
            scheduler.step()
            ema.update_parameters(model.module)


def barrier_after_step(epochs: int) -> None:
    """A barrier at the end of every block, as some put there to keep logs in order."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, fused=True)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
