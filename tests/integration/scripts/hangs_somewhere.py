"""One worker of the group hangs once, at PLACE.

Arguments: PLACE (block, between, call, before) RANK FLAG [SECONDS]. The hang makes the file FLAG.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from toy import Toy

place, rank, flag = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 3600.0


def hang_at(where: str, step: int) -> None:
    at = 0 if place == "before" else 20
    if where == place and session.rank == rank and step >= at and not flag.exists():
        flag.write_text(str(time.time()))
        time.sleep(seconds)


def evaluate(step: int) -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    hang_at("call", step)
    dist.all_reduce(total)
    return float(total)


toy = Toy(samples=4096, batch_size=2)
session = toy.session
for step in session.steps(toy.data, epochs=100):
    hang_at("before", step.index)
    with step:
        for (x,) in step.batches():
            hang_at("block", step.index)
            step.backward(toy.model(x).square().mean())
        toy.optimizer.step()
        toy.optimizer.zero_grad()
        time.sleep(0.01)
    hang_at("between", step.index)
    if step.index % 10 == 9:
        session.run(evaluate, step.index)
