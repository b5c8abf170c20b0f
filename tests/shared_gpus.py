"""Lets a node's workers share its GPUs if there are more workers, so that one GPU tests NCCL.

NCCL refuses two ranks of one host on one GPU. Here workers on the same GPU belong to different
hosts as far as NCCL knows, and communicate over sockets of the loopback. Their kernels take turns
on the GPU, so collectives take milliseconds: speeds mean nothing.
"""

from __future__ import annotations

import os

import torch

from elastic.worker.group.process_group import Backend


def use() -> None:
    """Share the GPUs in this process. Call it before elastic.init(). Without GPUs: do nothing."""
    if torch.version.cuda and torch.cuda.device_count():
        Backend.register(_shared)


def _shared(slot: int) -> Backend:
    host, gpu = divmod(slot, torch.cuda.device_count())
    # NCCL reads these when the process makes its first communicator.
    os.environ.update(NCCL_HOSTID=f"host-{host}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return Backend(name="nccl", device=device, queues=True, aborts=True)
