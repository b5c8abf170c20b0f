"""Measures elastic's own time in a step, part by part, by probes inside of a running job.

    python -m benchmarks.own_time                         # all sizes, 3 minutes
    python -m benchmarks.own_time --sizes 100bn 1002t

Two jobs of equal code differ by some percent, so a ratio of step times near 1 shows nothing. Times
are medians over steps, in microseconds, of the worker of rank 0; each probe adds about one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.jobs import elastic_job, marks_directory
from benchmarks.report import command_line, save, show
from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.probed_train import FILE

_LIMIT_S = 300.0


def main() -> None:
    options = _parse()
    measured = {size: _measure(size, options.workers, options.steps) for size in options.sizes}
    parts = sorted({part for size in measured.values() for part in size})
    rows = [[part, *(f"{m.get(part, 0.0) * 1e6:.0f}" for m in measured.values())] for part in parts]
    rows.append(["all", *(f"{sum(m.values()) * 1e6:.0f}" for m in measured.values())])
    show("Elastic's own time in a step, in microseconds", ["part", *measured], rows)
    save("own_time", {"options": vars(options), "load_1min": os.getloadavg()[0], "s": measured})


def _parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["2ms", "100bn", "1002t"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=900, help="at least so many steps (900)")
    return parser.parse_args()


def _measure(size: str, workers: int, steps: int) -> dict[str, float]:
    """Return the seconds of each part."""
    model = SIZES[size]
    epochs = -(-steps * model.batch_size * workers // model.samples)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["--size", size, "--epochs", str(epochs), "--one-by-one"]
        script = "probed_train.py"
        with elastic_job(Path(scratch), *arguments, workers=workers, script=script) as job:
            job.wait_for_end(_LIMIT_S)
        parts: dict[str, float] = json.loads((marks_directory(Path(scratch)) / FILE).read_text())
    return parts


if __name__ == "__main__":
    main()
