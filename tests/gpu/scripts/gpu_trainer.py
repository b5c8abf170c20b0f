"""Trains with SyncBatchNorm on the session's device, in one of several styles; records steps."""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import elastic
from tests import shared_gpus
from tests.chaos.problem import dataset, loss_of
from tests.chaos.scripts.float64_trainer import digest


def places(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the device types that hold the optimizer's state, sorted."""
    return sorted({t.device.type for state in optimizer.state.values() for t in state.values()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--style", choices=["plain", "bf16-hook", "autocast", "scaler", "compiled"], default="plain"
    )
    parser.add_argument("--share", action="store_true", help="workers share the GPUs")
    options = parser.parse_args()
    if options.share:
        shared_gpus.use()
    session = elastic.init()
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    model = session.distribute(nn.SyncBatchNorm.convert_sync_batchnorm(net))
    if options.style == "bf16-hook":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    forward = torch.compile(model) if options.style == "compiled" else model
    # A fused AdamW keeps its step count on the device, any other on the host.
    fused = options.style == "scaler"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cuda", enabled=options.style == "scaler")
    session.track(model=model, optimizer=optimizer, scaler=scaler)
    data = elastic.DataLoader(dataset(), batch_size=8, seed=3, pin_memory=True)
    record = (options.out / f"steps-{os.getpid()}.jsonl").open("w", buffering=1)
    mixed = {"autocast": torch.bfloat16, "scaler": torch.float16}.get(options.style)
    for step in session.steps(data, epochs=options.epochs):
        attempt = {"kind": "attempt", "step": step.index, "generation": session.generation}
        record.write(json.dumps(attempt) + "\n")
        with step:
            time.sleep(0.02)
            for inputs, targets in step.batches():
                assert inputs.is_cuda
                with torch.autocast("cuda", dtype=mixed) if mixed else contextlib.nullcontext():
                    loss = loss_of(forward(inputs.float()), targets.float())
                step.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if step.committed:
            row = {
                "kind": "commit",
                "step": step.index,
                "generation": session.generation,
                "rank": session.rank,
                "digest": digest(model),
                "places": places(optimizer),
            }
            record.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
