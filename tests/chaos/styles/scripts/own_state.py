"""Scripts with state of their own."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import elastic
from tests.chaos.styles import tasks


class History:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict) -> None:
        self.losses = list(state["losses"])


def averaged_figures(epochs: int) -> None:
    """Loss and error over the global batch, from step.mean; their history decides the rate."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    history = History()
    session.track(model=model, optimizer=optimizer, history=history)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                outputs = model(inputs)
                loss = F.mse_loss(outputs, targets)
                figures = step.mean(loss=loss, error=(outputs - targets).abs().mean())
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            history.losses.append(figures.loss + figures["error"])
            if len(history.losses) == 20:
                optimizer.param_groups[0]["lr"] = 0.01 / (1.0 + history.losses[-1])
                history.losses.clear()


class RunningStatistics:
    """Count, mean and squares of all samples seen, in NumPy."""

    def __init__(self, features: int) -> None:
        self.count = 0
        self.total, self.squares = np.zeros(features), np.zeros(features)
        self.seen_in_epoch: dict[str, int] = {}

    def update(self, inputs: torch.Tensor, epoch: int) -> None:
        rows = torch.full_like(inputs[0, :1], len(inputs))
        sums = torch.cat([rows, inputs.sum(dim=0), inputs.square().sum(dim=0)])
        dist.all_reduce(sums)
        sums = sums.cpu()
        count, total, squares = sums.numpy()[:1], sums.numpy()[1:9], sums.numpy()[9:]
        self.count += int(count[0])
        self.total += total
        self.squares += squares
        name = f"epoch {epoch}"
        self.seen_in_epoch[name] = self.seen_in_epoch.get(name, 0) + int(count[0])

    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = self.total / self.count
        deviation = np.sqrt(np.maximum(self.squares / self.count - mean**2, 1e-6))
        mean, deviation = (torch.from_numpy(a).to(inputs.device) for a in (mean, deviation))
        return (inputs - mean) / deviation

    def state_dict(self) -> dict:
        return {
            "count": self.count,
            "total": torch.from_numpy(self.total.copy()),
            "squares": torch.from_numpy(self.squares.copy()),
            "seen_in_epoch": dict(self.seen_in_epoch),
        }

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        self.total, self.squares = state["total"].numpy().copy(), state["squares"].numpy().copy()
        self.seen_in_epoch = dict(state["seen_in_epoch"])


def custom_tracked(epochs: int) -> None:
    """Inputs are normalised by running statistics of all workers, kept in a hand-written object."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    statistics = RunningStatistics(8)
    session.track(model=model, optimizer=optimizer, statistics=statistics)
    data = elastic.DataLoader(tasks.regression(samples=64), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                statistics.update(inputs, step.epoch)
                step.backward(F.mse_loss(model(statistics.normalise(inputs)), targets))
            optimizer.step()
            optimizer.zero_grad()


class Ring:
    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(2000, 8, dtype=torch.float64, device=device)
        self.written = 0


class Bank:
    def __init__(self, device: torch.device) -> None:
        self.ring = Ring(device)

    def add(self, row: torch.Tensor) -> None:
        self.ring.rows[self.ring.written % len(self.ring.rows)] = row
        self.ring.written += 1

    def mean(self) -> torch.Tensor:
        return self.ring.rows.sum(dim=0) / max(self.ring.written, 1)

    def state_dict(self) -> dict:
        return {"rows": self.ring.rows, "written": self.ring.written}

    def load_state_dict(self, state: dict) -> None:
        self.ring.rows.copy_(state["rows"])
        self.ring.written = state["written"]


def memory_bank(epochs: int) -> None:
    """A large memory bank in an object inside of the tracked one, written before the backward pass
    in some steps only."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    bank = Bank(session.device)
    session.track(model=model, optimizer=optimizer, bank=bank)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            # Undo learns again at powers of two; the last two of these never fall on one.
            if step.index % 7 in (3, 5, 6):
                bank.add(torch.full((8,), float(step.index % 5), dtype=torch.float64))
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs + 0.1 * bank.mean()), targets))
            optimizer.step()
            optimizer.zero_grad()


def session_state(epochs: int) -> None:
    """Counters and the best loss live in session.state; some are changed before the backward."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    session.state.setdefault("begun", 0)
    session.state.setdefault("epochs", [])
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            session.state["begun"] += 1
            rate = 0.02 / (1.0 + 0.01 * session.state["begun"])
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            for group in optimizer.param_groups:
                group["lr"] = rate / (1 + len(session.state["epochs"]))
            optimizer.step()
            optimizer.zero_grad()
            if step.ends_epoch:
                session.state["epochs"] = [*session.state["epochs"], step.epoch][-3:]


class Tracked:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["state"])


def generator_of_ones_own(epochs: int) -> None:
    """A generator of the script's own, tracked through a small object, draws each step's noise."""
    session = elastic.init()
    generator = torch.Generator().manual_seed(17)
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer, generator=Tracked(generator))
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            shift = 0.1 * torch.randn(8, generator=generator, dtype=torch.float64)
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs + shift.to(inputs.device)), targets))
            optimizer.step()
            optimizer.zero_grad()


def generators(epochs: int) -> None:
    """Each step draws a feature mask, a mixing factor and a choice, the same on all workers."""
    session = elastic.init()
    masks = session.generator("masks", kind="torch")
    mixing = session.generator("mixing", kind="numpy")
    choices = session.generator("choices", kind="python")
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            keep = (torch.rand(8, generator=masks) > 0.1).to(session.device)
            factor = float(mixing.beta(4.0, 1.0))
            sign = choices.choice([-1.0, 1.0])
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs * keep), factor * targets))
                step.backward(F.mse_loss(model(inputs * sign), targets * sign))
            optimizer.step()
            optimizer.zero_grad()


class Records(Dataset):
    def __init__(self) -> None:
        self.inputs, self.targets = tasks.regression().tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict:
        halves = self.inputs[index].split(4)
        return {
            "name": f"sample-{index}",
            "inputs": {"left": halves[0], "rest": (halves[1], torch.tensor(index))},
            "target": self.targets[index],
        }


def _collate(samples: list[dict]) -> dict:
    batch = default_collate(samples)
    batch["weights"] = torch.tensor([1.0 + len(s["name"]) / 100 for s in samples]).double()
    return batch


def loader_processes(epochs: int) -> None:
    """Two loader processes a worker; samples are nested dicts with strings, collated by hand."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(
        Records(),
        batch_size=8,
        global_batch=8,
        seed=3,
        num_workers=2,
        prefetch_factor=2,
        collate_fn=_collate,
    )
    for step in session.steps(data, epochs=epochs):
        with step:
            for batch in step.batches():
                nested = batch["inputs"]
                outputs = model(torch.cat([nested["left"], nested["rest"][0]], dim=1))
                losses = F.mse_loss(outputs, batch["target"], reduction="none").squeeze(1)
                step.backward((losses * batch["weights"]).mean())
            optimizer.step()
            optimizer.zero_grad()
