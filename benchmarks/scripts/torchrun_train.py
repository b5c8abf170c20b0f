"""Trains the same MLP with plain DDP, as torchrun's documentation shows it, and logs each step.

    torchrun --nproc-per-node 3 benchmarks/scripts/torchrun_train.py --log-dir DIRECTORY \\
        --checkpoint FILE --checkpoint-every 20
"""

import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.scripts import mlp
from benchmarks.scripts.arguments import parse
from benchmarks.scripts.step_log import BEGIN, COMMIT, READY, StepLog
from benchmarks.scripts.styles import STYLES
from benchmarks.scripts.turns import Turns


def load(path: Path | None, **objects: Any) -> int:
    """Restore the objects; return the number of steps done, 0 without a checkpoint."""
    if path is None or not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    for name, target in objects.items():
        target.load_state_dict(saved[name])
    return int(saved["steps"])


def save(path: Path, steps: int, **objects: Any) -> None:
    """Write to another file and rename it, so that a kill never leaves half a checkpoint."""
    aside = path.with_suffix(".writing")
    torch.save({"steps": steps, **{k: v.state_dict() for k, v in objects.items()}}, aside)
    os.replace(aside, path)


def main() -> None:
    options = parse(__doc__)
    size = mlp.SIZES[options.size]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    log, turns = StepLog(options.log_dir), Turns(options.turns)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    seed = os.getpid() if options.unlike else 0
    style = STYLES[options.style](size, seed, DistributedDataParallel, device)
    steps = load(options.checkpoint, **style.tracked)
    held = bytearray(b"1") * (options.held_mb * 2**20)
    log.mark(READY, 0, generation=0, rank=0, world_size=0)
    data = mlp.dataset(size, one_by_one=options.one_by_one)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=size.batch_size, sampler=sampler, drop_last=True)
    group = {
        "generation": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
    }

    for epoch in range(steps // len(loader), options.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in islice(loader, steps % len(loader), None):
            if not turns.wait(steps):
                del held
                return
            log.mark(BEGIN, steps, **group)
            inputs, labels = (
                inputs.to(device, non_blocking=True),
                labels.to(device, non_blocking=True),
            )
            style.train(inputs, labels, torch.Tensor.backward)
            style.below()
            log.mark(COMMIT, steps, **group)
            steps += 1
            if options.checkpoint and steps % options.checkpoint_every == 0 and group["rank"] == 0:
                save(options.checkpoint, steps, **style.tracked)


if __name__ == "__main__":
    main()
