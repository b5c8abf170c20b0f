"""Trains a small model in float64 and records every attempted and every committed step.

OUT/steps-PID.jsonl, or steps-PID-N.jsonl, has a line for each attempt and for each commit, which
has a digest of all weights; with --record-blocks also for each block that begins.
OUT/initial-PID.pt, OUT/final-PID.pt and OUT/weights-STEP-GENERATION.pt have the weights at the
start, at the end and after some steps. The script reports its loss, which is NaN while the file
OUT/not-finite exists. Steps take longer on a host that has a file OUT/slow-HOST, and do not end
while the file OUT/held exists.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import TextIO

import torch
from torch import nn

import elastic
from tests import nccl_manners, shared_gpus
from tests.chaos.problem import build, dataset, loss_of

SLOWER = 1.6


def digest(model: nn.Module) -> str:
    weights = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        weights.update(parameter.detach().cpu().numpy().tobytes())
    return weights.hexdigest()


def open_record(out: Path) -> TextIO:
    """Open a new file: in a job of thousands of workers an earlier one may have had this pid."""
    for number in itertools.count():
        again = f"-{number}" if number else ""
        with contextlib.suppress(FileExistsError):
            return (out / f"steps-{os.getpid()}{again}.jsonl").open("x", buffering=1)
    raise AssertionError("unreachable")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=None)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--weights-every", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--record-blocks", action="store_true")
    parser.add_argument("--nccl-manners", action="store_true")
    parser.add_argument("--news-late-s", type=float, default=0.0, help="of each announcement")
    options = parser.parse_args()

    shared_gpus.use()
    if options.nccl_manners:
        nccl_manners.use(news_late_s=options.news_late_s)
    session = elastic.init()
    model = session.distribute(build(torch.initial_seed() + os.getpid()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.scale_lr(optimizer, elastic.LinearScaling(reference_world=1, warmup_steps=7))
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(
        dataset(),
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        global_batch=options.global_batch,
        num_workers=options.loaders,
        seed=3,
    )
    record = open_record(options.out)

    slow = options.out / f"slow-{socket.gethostname()}"

    def write(kind: str, **fields: object) -> None:
        record.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

    for step in session.steps(data, epochs=options.epochs):
        if step.index == 0:
            torch.save(model.state_dict(), options.out / f"initial-{os.getpid()}.pt")
        write("attempt", step=step.index, generation=session.generation, rank=session.rank)
        index = step.index
        with step:
            if options.record_blocks:
                write("block", step=index, generation=session.generation)
            factor = session.lr_factor()
            time.sleep(options.step_s * (SLOWER if slow.exists() else 1.0))
            while (options.out / "held").exists():
                time.sleep(0.01)
            for inputs, targets in step.batches():
                loss = loss_of(model(inputs), targets)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step.report(loss=math.nan if (options.out / "not-finite").exists() else loss)
        # The index changes if the others went on without this member and bring it to a later step.
        if step.committed and step.index == index:
            write(
                "commit",
                step=step.index,
                generation=session.generation,
                rank=session.rank,
                world_size=session.world_size,
                host=socket.gethostname(),
                lr_factor=factor,
                digest=digest(model),
            )
            if (
                session.rank == 0
                and options.weights_every
                and not step.index % options.weights_every
            ):
                name = f"weights-{step.index}-{session.generation}.pt"
                torch.save(model.state_dict(), options.out / name)
    torch.save(model.state_dict(), options.out / f"final-{os.getpid()}.pt")


if __name__ == "__main__":
    main()
