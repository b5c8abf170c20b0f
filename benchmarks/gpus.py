"""Compares the step time and the memory of elastic with plain DDP under torchrun, on GPUs.

    python -m benchmarks.gpus                                # one worker for each GPU, 5 minutes
    python -m benchmarks.gpus --sizes 25m --repeat 1

Whole runs take turns: elastic, torchrun, torchrun, elastic. A step's time is that of all steps
after the first ones, from one wait for the device to another, so that queued work counts too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch

from benchmarks.jobs import SCRIPTS
from benchmarks.report import command_line, save, show
from benchmarks.scripts.gpt_steps import SIZES
from tests.job_process import ROOT

_LIMIT_S = 300.0
_SIDES = ("elastic", "ddp")


def main() -> None:
    options = _parse()
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for size in options.sizes:
        runs[size] = {side: [] for side in _SIDES}
        for turn in range(options.repeat):
            for side in _SIDES if turn % 2 == 0 else _SIDES[::-1]:
                runs[size][side].append(_run(side, size, options))
                print(size, side, runs[size][side][-1], flush=True)
    _show(runs)
    save("gpus", {"options": vars(options), "gpu": _gpu(), "runs": runs})


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--workers", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--steps", type=int, default=200, help="that are measured in a run (200)")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each side (2)")
    return parser.parse_args()


def _run(side: str, size: str, options: argparse.Namespace) -> dict[str, float]:
    script = [str(SCRIPTS / "gpt_steps.py"), "--api", side, "--size", size]
    script += ["--steps", str(options.steps)]
    workers = ["--nproc-per-node", str(options.workers)]
    with tempfile.TemporaryDirectory() as logs:
        if side == "elastic":
            command = ["elastic.cli", "run", "--log-dir", logs, *workers]
        else:
            command = ["torch.distributed.run", "--standalone", *workers]
        done = subprocess.run(
            [sys.executable, "-m", *command, *script],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    for line in done.stdout.splitlines():
        at = line.find('{"step_s"')
        if at >= 0:
            found: dict[str, float] = json.loads(line[at:])
            return found
    raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _show(runs: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    rows = []
    for size, sides in runs.items():
        step_s = {s: [run["step_s"] for run in found] for s, found in sides.items()}
        memory = {s: max(run["memory_mib"] for run in found) for s, found in sides.items()}
        ours, theirs = (statistics.median(step_s[side]) for side in _SIDES)
        rows.append(
            [
                size,
                *(f"{1000 * s:.2f}" for s in (ours, theirs)),
                f"{ours / theirs:.3f}",
                f"{_ratio(sides, 'median_s'):.3f}",
                f"{_ratio(sides, 'warm_up_s'):.2f}",
                *(f"{max(step_s[side]) / min(step_s[side]):.3f}" for side in _SIDES),
                *(f"{memory[side]:.0f}" for side in _SIDES),
            ]
        )
    columns = ["model", "elastic ms", "DDP ms", "ratio", "of medians", "of warm-up"]
    columns += ["elastic again", "DDP again", "elastic MiB", "DDP MiB"]
    show("Step time and memory on GPUs", columns, rows)
    print("again: the ratio of a side's slowest run to its fastest")


def _ratio(sides: dict[str, list[dict[str, float]]], figure: str) -> float:
    ours, theirs = (statistics.median(run[figure] for run in sides[side]) for side in _SIDES)
    return ours / theirs


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "none"}
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()),
    }


if __name__ == "__main__":
    main()
