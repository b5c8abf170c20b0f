"""Plain DDP as in torch's documentation; it uses only what torchrun tells its scripts.

Each process prints `start RANK/WORLD restart N at step S pid PID`, and rank 0 each `step S`.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--pace-s", type=float, default=0.0)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
done = 0
if options.checkpoint.exists():
    saved = torch.load(options.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"start {rank}/{world} restart {restart} at step {done} pid {os.getpid()}", flush=True)

numbers = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(numbers)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
epoch = 0
while done < options.steps:
    sampler.set_epoch(epoch)
    epoch += 1
    for (batch,) in loader:
        if done == options.steps:
            break
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        time.sleep(options.pace_s)
        if rank == 0:
            print(f"step {done}", flush=True)
            if done % options.every == 0:
                aside = options.checkpoint.with_suffix(".writing")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"done": done, **state}, aside)
                os.replace(aside, options.checkpoint)
dist.destroy_process_group()
print(f"end {rank}/{world}", flush=True)
