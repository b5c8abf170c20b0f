"""Scripts that must be refused, most of them because they would silently go wrong."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import elastic
from tests.chaos.styles import tasks


def refused_bare_forward(epochs: int) -> None:
    """Forward goes through the bare module, so its gradients are not averaged."""
    session = elastic.init()
    net = tasks.net()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def refused_batches_in_a_list(epochs: int) -> None:
    """All micro-batches are taken before the first loss: each would get the weight of the last."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=3, global_batch=29, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in list(step.batches()):
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def refused_bf16_hook(epochs: int) -> None:
    """DDP's own bf16 hook, which torch has for GPUs only, on CPUs."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


def refused_collective_below(epochs: int) -> None:
    """The loss is averaged for a log below the block, where a newcomer would not take part."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if session.rank == 0:
            print(total.item() / session.world_size)


def refused_loops_interleaved(epochs: int) -> None:
    """Two loops over the steps run side by side."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    first, second = (
        elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=seed)
        for seed in (3, 4)
    )
    loops = (session.steps(data, epochs=epochs) for data in (first, second))
    for pair in zip(*loops, strict=True):
        for step in pair:
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


def refused_not_distributed(epochs: int) -> None:
    """The model was never given to session.distribute."""
    session = elastic.init()
    model = tasks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


def refused_values_that_differ(epochs: int) -> None:
    """Each rank keeps the best loss of its own samples in session.state, and decides by it."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=24, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                loss = F.mse_loss(model(inputs), targets)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            best = session.state.get("best", 1e9)
            session.state["best"] = min(best, float(loss.detach()))


def _evaluate(model: torch.nn.Module) -> float:
    inputs, targets = tasks.regression(samples=90).tensors
    with torch.no_grad():
        loss = F.mse_loss(model.module(inputs), targets)
    dist.all_reduce(loss)
    return float(loss)


def refused_run_on_one_member(epochs: int) -> None:
    """Only rank 0 evaluates, with a function that has a collective in it."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if session.rank == 0 and step.index % 5 == 4:
            session.run(_evaluate, model)


def refused_step_in_backward(epochs: int) -> None:
    """Each parameter has an optimizer that steps as soon as its gradient is there, before it is
    averaged. On one device that saves memory."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizers = {p: torch.optim.SGD([p], lr=0.02, momentum=0.9) for p in model.parameters()}
    session.track(model=model, **{f"sgd{i}": o for i, o in enumerate(optimizers.values())})

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))


def refused_sync_batch_norm(epochs: int) -> None:
    """SyncBatchNorm, which torch has for GPUs only, on CPUs."""
    session = elastic.init()
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).double()
    model = session.distribute(nn.SyncBatchNorm.convert_sync_batchnorm(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    tasks.train(session, model, optimizer, epochs)


def refused_tracking_in_the_loop(epochs: int) -> None:
    """An average is made and tracked only when the third epoch begins: a worker that joins later
    receives the others' state before it has reached that line."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    average = None
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        if step.epoch == 2 and average is None:
            average = AveragedModel(model.module)
            session.track(average=average)
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model.module)


def refused_two_backward_passes(epochs: int) -> None:
    """Two losses of one forward pass, with a backward pass each: only the first is averaged."""
    session = elastic.init()
    model = session.distribute(tasks.net(outputs=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs)
                step.backward(F.mse_loss(outputs[:, :1], targets), retain_graph=True)
                step.backward(F.l1_loss(outputs[:, 1:], targets))
            optimizer.step()
            optimizer.zero_grad()


def refused_two_blocks(epochs: int) -> None:
    """A step has two blocks: it would be committed twice."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        for _ in range(2):
            with step:
                for inputs, targets in step.batches():
                    step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


def refused_untracked_optimizer(epochs: int) -> None:
    """The optimizer is not tracked, so a newcomer's would start from scratch."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.track(model=model)
    tasks.train(session, model, optimizer, epochs)
