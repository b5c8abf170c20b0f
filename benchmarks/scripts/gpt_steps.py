"""Trains the GPT of examples/gpt.py on random bytes for a number of steps, and prints their time.

    elastic run benchmarks/scripts/gpt_steps.py --size 85m
    torchrun --standalone benchmarks/scripts/gpt_steps.py --api ddp --size 85m

The last line of rank 0 is a JSON object: `step_s`, the mean seconds of a step after the first ones,
between two waits for the device; `median_s`, their median as the host sees it; `warm_up_s`, the
seconds of the first ones; `memory_mib`, the most of the device's memory that was taken.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elastic
from examples.gpt import BYTES, GPT, loss_of


@dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT and its batches; `batch_size` is per worker."""

    layers: int
    heads: int
    width: int
    context: int
    batch_size: int


SIZES = {
    "1m": Size(layers=4, heads=4, width=128, context=128, batch_size=32),
    "25m": Size(layers=8, heads=8, width=512, context=512, batch_size=32),
    "85m": Size(layers=12, heads=12, width=768, context=1024, batch_size=16),
    "300m": Size(layers=24, heads=16, width=1024, context=1024, batch_size=8),
}
WARM_UP = 20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=["elastic", "ddp"], default="elastic")
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--steps", type=int, default=200, help="after the warm-up (200)")
    return parser.parse_args()


class Clock:
    """Takes the time of all steps but the first WARM_UP."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps, self.done = device, steps, 0
        self._ticks = [time.monotonic()]

    def tick(self) -> bool:
        """Count a step; return True after the last one."""
        self.done += 1
        if self.done == WARM_UP:
            self._wait()
        self._ticks.append(time.monotonic())
        return self.done == WARM_UP + self.steps

    def report(self) -> None:
        self._wait()
        began_at, now = self._ticks[WARM_UP], time.monotonic()
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) if on_gpu else 0
        found = {
            "step_s": (now - began_at) / self.steps,
            "median_s": statistics.median(b - a for a, b in pairwise(self._ticks[WARM_UP:])),
            "warm_up_s": began_at - self._ticks[0],
            "memory_mib": memory / 2**20,
        }
        print(json.dumps(found), flush=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build(size: Size) -> GPT:
    torch.manual_seed(0)
    return GPT(size.layers, size.heads, size.width, size.context)


def dataset(size: Size, steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = (WARM_UP + steps) * size.batch_size * int(os.environ.get("WORLD_SIZE", "1"))
    text = torch.randint(BYTES, (rows, size.context + 1), generator=generator)
    return TensorDataset(text)


def loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    with torch.autocast(text.device.type, torch.bfloat16):
        return loss_of(model(text[:, :-1]), text[:, 1:])


def by_elastic(size: Size, steps: int) -> None:
    session = elastic.init()
    model = session.distribute(build(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(
        dataset(size, steps), batch_size=size.batch_size, num_workers=2, pin_memory=True
    )
    clock = Clock(session.device, steps)
    for step in session.steps(data, epochs=2):
        with step:
            for (text,) in step.batches():
                step.backward(loss(model, text))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if clock.tick():
            break
    if session.rank == 0:
        clock.report()


def by_ddp(size: Size, steps: int) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = DistributedDataParallel(build(size).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = dataset(size, steps)
    loader = DataLoader(
        data,
        batch_size=size.batch_size,
        sampler=DistributedSampler(data),
        num_workers=2,
        pin_memory=True,
    )
    clock = Clock(device, steps)
    for text in _batches(loader, device):
        loss(model, text).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clock.tick():
            break
    if dist.get_rank() == 0:
        clock.report()
    dist.destroy_process_group()


def _batches(loader: DataLoader, device: torch.device) -> Iterator[torch.Tensor]:
    for (text,) in loader:
        yield text.to(device, non_blocking=True)


def main() -> None:
    options = parse()
    train = by_elastic if options.api == "elastic" else by_ddp
    train(SIZES[options.size], options.steps)


if __name__ == "__main__":
    main()
