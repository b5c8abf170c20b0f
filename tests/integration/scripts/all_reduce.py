"""Sums over two processes on two hosts, with plain torch: all_reduce.py RANK MASTER INTERFACE"""

import datetime
import os
import sys

import torch
import torch.distributed as dist

rank, master, interface = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["GLOO_SOCKET_IFNAME"] = interface  # else gloo resolves the host's name, or takes lo
dist.init_process_group(
    "gloo",
    init_method=f"tcp://{master}:29500",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
tensor = torch.tensor([float(rank + 1)])
dist.all_reduce(tensor)
print(tensor.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
