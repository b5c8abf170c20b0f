"""A process that tries torch on this node for `elastic doctor`: `python -m elastic.worker.trial`.

It writes one JSON line about the torch and the devices of this node. Then it reads one JSON line
that says how to meet other nodes for an all-reduce, and writes one JSON line with the result. At
the end of its input it ends instead.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_BYTES = (4, 2**20, 16 * 2**20)
"""Sizes of tensors: for the latency, for the warm-up (or a slow network), and for the bandwidth."""
_TRIED_S = 1.0
_TIMES = 3


def main() -> None:
    # Only the answers: NCCL_DEBUG, for one, has libraries write to standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(_attempted(_torch)), file=answers)
    line = sys.stdin.readline()
    if line.strip():
        meeting = json.loads(line)
        print(json.dumps(_attempted(lambda: _all_reduce(**meeting))), file=answers)
    sys.stdout.flush()
    os._exit(0)  # not stopped by threads that a backend has left


def _attempted(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the error is the finding
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:500]}


def _torch() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - a failed import is a finding

    count = torch.cuda.device_count() if torch.version.cuda else 0
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "devices": [torch.cuda.get_device_name(n) for n in range(count)],
        "device_errors": [],
    }
    for n in range(count):
        try:
            ones = torch.ones(256, 256, device=f"cuda:{n}")
            if float((ones @ ones).sum()) != 256.0**3:
                found["device_errors"].append(f"GPU {n}: a matrix product is wrong")
        except RuntimeError as error:
            found["device_errors"].append(f"GPU {n}: {str(error).splitlines()[0]}")
    if count:
        found |= _nccl(count)
    return found


def _nccl(count: int) -> dict[str, str]:
    """NCCL's version, and the error of an all-reduce over the GPUs of this node; "" if none."""
    import torch  # noqa: PLC0415
    from torch.cuda import nccl  # noqa: PLC0415

    library: Any = nccl  # has no types
    version = ".".join(map(str, library.version()[:3]))
    try:
        tensors = [torch.ones(1024, device=f"cuda:{n}") for n in range(count)]
        library.all_reduce(tensors)
        sums = [float(tensor[0]) for tensor in tensors]
    except RuntimeError as error:
        return {"nccl": version, "nccl_error": str(error).splitlines()[0]}
    wrong = [total for total in sums if total != count]
    return {
        "nccl": version,
        "nccl_error": f"an all-reduce summed to {wrong[0]}, not {count}" if wrong else "",
    }


def _all_reduce(
    rank: int, world: int, host: str, port: int, interface: str | None, timeout_s: float
) -> dict[str, Any]:
    """Measure all-reduces over one process on each node. Rank 0 hosts the store at `host` and
    `port`. Returns the bandwidth in bytes per second and the latency in seconds. If only the large
    ones fail, return their size as `stalled_bytes`: the nodes are connected."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    from elastic.worker.group.process_group import StoreHost  # noqa: PLC0415

    if interface is not None:  # else gloo uses the address of the host's own name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    limit = datetime.timedelta(seconds=timeout_s)
    hosted = StoreHost(host, (port, port)) if rank == 0 else None
    store = TCPStore(host, hosted.port if hosted else port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)

    def seconds_of(size: int) -> float:
        tensor = torch.ones(size // 4)
        began = time.monotonic()
        dist.all_reduce(tensor)
        took = time.monotonic() - began
        if float(tensor[0]) != world:
            raise RuntimeError(f"an all-reduce over {world} nodes summed to {float(tensor[0])}")
        return took

    small, some, large = _BYTES
    latency = min(seconds_of(small) for _ in range(10))
    try:
        warmed_s = seconds_of(some)
        # Rank 0's choice counts. On a slow network the first one has to do.
        size = large if warmed_s < _TRIED_S / 32 else some
        chosen = torch.tensor([size, _TIMES if warmed_s < _TRIED_S else 0])
        dist.broadcast(chosen, src=0)
        size, times = chosen.tolist()
        took = min([seconds_of(size) for _ in range(times)] or [warmed_s])
    except RuntimeError as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        return {"latency_s": latency, "stalled_bytes": some, "stalled": told}
    carried = 2 * (world - 1) / world * size
    # Wait, so that no process closes connections that another one still reads from.
    dist.barrier()
    return {"bytes_per_s": carried / took, "latency_s": latency}


if __name__ == "__main__":
    main()
