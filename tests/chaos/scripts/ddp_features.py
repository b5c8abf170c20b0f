"""Trains one model for each of DDP's options, all in the same steps, and records every step."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import elastic
from tests.chaos.problem import dataset, loss_of
from tests.chaos.scripts.float64_trainer import digest


class TwoPaths(nn.Module):
    """Uses one of two layers, so the other one's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, number: int = 0) -> torch.Tensor:
        return self.even(inputs) if number % 2 == 0 else self.odd(inputs)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    session = elastic.init()
    models = {
        "plain": session.distribute(net(), bucket_cap_mb=0.0001),
        "unused": session.distribute(TwoPaths(), find_unused_parameters=True),
        "static": session.distribute(net(), static_graph=True),
        "views": session.distribute(net(), gradient_as_bucket_view=True),
        "normalised": session.distribute(normalised()),
        "fp16": session.distribute(net()),
        "power": session.distribute(net()),
    }
    models["fp16"].register_comm_hook(None, default_hooks.fp16_compress_hook)
    models["power"].register_comm_hook(
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=5),
        powerSGD_hook.powerSGD_hook,
    )
    everything = nn.ModuleDict(models)
    optimizer = torch.optim.AdamW(everything.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 40], gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    session.track(optimizer=optimizer, scheduler=scheduler, scaler=scaler, **models)
    data = elastic.DataLoader(dataset(), batch_size=4, accumulate=2, seed=3)
    record = (options.out / f"steps-{os.getpid()}.jsonl").open("w", buffering=1)

    for step in session.steps(data, epochs=options.epochs):
        attempt = {"kind": "attempt", "step": step.index, "generation": session.generation}
        record.write(json.dumps(attempt) + "\n")
        with step:
            time.sleep(0.02)
            for inputs, targets in step.batches():
                inputs, targets = inputs.float(), targets.float()
                for name, model in models.items():
                    extra = (step.index,) if name == "unused" else ()
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = loss_of(model(inputs, *extra), targets)
                    # One backward for each model: PowerSGD starts collectives from callbacks. In a
                    # common backward their order among those of other models would differ by rank.
                    step.backward(scaler.scale(loss.float()))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if step.committed:
            row = {
                "kind": "commit",
                "step": step.index,
                "generation": session.generation,
                "rank": session.rank,
                "world_size": session.world_size,
                "digest": digest(everything),
                "scheduled": scheduler.last_epoch,
            }
            record.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
