"""Hangs repeatedly, each time on the next rank and at the next of the given places.

Arguments: FOLDER PLACES... When a hang begins, its time, rank and step go to a file in FOLDER.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import elastic

folder, places = Path(sys.argv[1]), sys.argv[2:]
FIRST = 20  # the earliest step that hangs
first_of = {}  # generation: the first step that this process has seen of it


def hangs(place: str) -> bool:
    """Whether to hang here: the group is whole, has settled and is past the previous hang."""
    number = len(list(folder.iterdir()))
    if session.committed < first_of.setdefault(session.generation, session.committed) + 5:
        return False
    here = number < len(places) and places[number] == place and session.committed >= FIRST
    if not here or session.world_size < 3 or session.rank != number % 3:
        return False
    if number and int((folder / str(number - 1)).read_text().split()[2]) >= session.committed:
        return False
    begun = folder.parent / f"{number}.begun"
    begun.write_text(f"{time.time()} {session.rank} {session.committed}")
    begun.rename(folder / str(number))
    return True


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if hangs("data"):
            time.sleep(3600)
        return torch.full((4,), index / 100_000)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hangs("forward"):
            time.sleep(3600)
        if hangs("lock"):
            lock = threading.Lock()
            with lock:
                lock.acquire()
        if hangs("collective"):
            dist.barrier()  # the others take it for their own collective
        if hangs("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.layer(x)


def evaluate() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    if hangs("call"):
        time.sleep(3600)
    dist.all_reduce(total)
    return float(total)


session = elastic.init()
model = session.distribute(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(Samples(), batch_size=2, seed=0)

for step in session.steps(data, epochs=100):
    with step:
        for x in step.batches():
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    if hangs("between"):
        time.sleep(3600)
    if session.committed % 5 == 0:
        session.run(evaluate)
