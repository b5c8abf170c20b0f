"""Trains on the session's device with SyncBatchNorm and the bf16 hook; records as tests/chaos."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import elastic
from tests.chaos.problem import dataset, loss_of
from tests.chaos.scripts.float64_trainer import digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    session = elastic.init()
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    model = session.distribute(nn.SyncBatchNorm.convert_sync_batchnorm(net))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(dataset(), batch_size=8, seed=3, pin_memory=True)
    record = (options.out / f"steps-{os.getpid()}.jsonl").open("w", buffering=1)
    for step in session.steps(data, epochs=options.epochs):
        attempt = {"kind": "attempt", "step": step.index, "generation": session.generation}
        record.write(json.dumps(attempt) + "\n")
        with step:
            time.sleep(0.02)
            for inputs, targets in step.batches():
                assert inputs.is_cuda
                step.backward(loss_of(model(inputs.float()), targets.float()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step.committed:
            row = {
                "kind": "commit",
                "step": step.index,
                "generation": session.generation,
                "rank": session.rank,
                "digest": digest(model),
            }
            record.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
