"""Trains on the backend of tests/nccl_manners.py and records every step, as float64_trainer does.

Nearly all the time passes just before one collective, so a kill most often leaves the other members
in it. This is the reduction of a figure for the log after the optimizer's step, or an evaluation.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elastic
from tests import nccl_manners, shared_gpus
from tests.chaos.problem import build, dataset, loss_of
from tests.chaos.scripts.float64_trainer import digest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--log-loss", action="store_true")
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps; 0: never")
    options = parser.parse_args()

    if torch.version.cuda and torch.cuda.device_count():
        shared_gpus.use()
    else:
        nccl_manners.use()
    session = elastic.init()
    model = session.distribute(build(torch.initial_seed() + os.getpid()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(dataset(), batch_size=4, seed=3)
    record = (options.out / f"steps-{os.getpid()}.jsonl").open("w", buffering=1)

    def write(kind: str, **fields: object) -> None:
        record.write(json.dumps({"kind": kind, **fields}) + "\n")

    def evaluate() -> float:
        time.sleep(options.step_s)
        total = torch.ones(1, dtype=torch.float64, device=session.device)
        dist.all_reduce(total)
        return float(total / session.world_size)

    logged = 1.0
    for step in session.steps(data, epochs=options.epochs):
        write("attempt", step=step.index, generation=session.generation)
        with step:
            for inputs, targets in step.batches():
                step.backward(loss_of(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if options.log_loss:
                time.sleep(options.step_s)
                ones = torch.ones(1, dtype=torch.float64, device=session.device)
                dist.all_reduce(ones)
                logged = float(ones / session.world_size)
        if step.committed and session.committed == step.index + 1:
            write(
                "commit",
                step=step.index,
                generation=session.generation,
                rank=session.rank,
                digest=digest(model),
                logged=logged,
            )
            if options.evaluate_every and session.committed % options.evaluate_every == 0:
                write("evaluated", step=step.index, value=session.run(evaluate))


if __name__ == "__main__":
    main()
