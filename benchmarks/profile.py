"""Shows which Python functions of elastic a step spends its time in, under cProfile.

    python -m benchmarks.profile                       # the 25 functions of elastic that take most
    python -m benchmarks.profile --out step.prof       # for snakeviz, pstats and the like

One process trains, by default the smallest model. cProfile slows down each call, short calls most:
trust the order of the functions, and measure an improvement with benchmarks.overhead.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from pathlib import Path

from torch import nn

import elastic
from benchmarks.report import show
from benchmarks.scripts import mlp

_WARM_UP = 200
_OWN = f"{Path(elastic.__file__).parent}/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="number of profiled steps (2000)")
    parser.add_argument("--size", choices=mlp.SIZES, default="tiny")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--out", type=Path, help="keep the profile in this file")
    options = parser.parse_args()
    profile = cProfile.Profile()
    step_s = train(mlp.SIZES[options.size], options.steps, profile)
    if options.out is not None:
        profile.dump_stats(options.out)
    statistics = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # by (file, line, name)
    own = sorted(
        (
            (in_itself, calls, f"{file.removeprefix(_OWN)}:{line}", name)
            for (file, line, name), (_, calls, in_itself, _, _) in statistics.items()
            if file.startswith(_OWN)
        ),
        reverse=True,
    )
    per_step = 1e6 / options.steps
    show(
        f"{options.size}: {1e3 * step_s:.2f} ms a step under cProfile, of which elastic's own "
        f"functions {sum(row[0] for row in own) * per_step:.0f} us",
        ("function", "us a step", "calls a step"),
        [
            (f"{name} ({place})", f"{in_itself * per_step:.1f}", f"{calls / options.steps:.1f}")
            for in_itself, calls, place, name in own[: options.rows]
        ],
    )


def train(size: mlp.Size, steps: int, profile: cProfile.Profile) -> float:
    """Train with a world size of one; return the mean seconds of the profiled steps."""
    session = elastic.init()
    model = session.distribute(mlp.build(size))
    optimizer = mlp.optimizer(model)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(mlp.dataset(size), batch_size=size.batch_size, drop_last=True)
    began = time.perf_counter()
    for step in session.steps(data, epochs=1 + steps):
        if step.index == _WARM_UP:
            began = time.perf_counter()
            profile.enable()
        if step.index == _WARM_UP + steps:
            profile.disable()
            break
        with step:
            for inputs, labels in step.batches():
                step.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()
