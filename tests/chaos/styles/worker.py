"""The script of every worker: runs one style, records it and slows it down."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from elastic.worker.state import cells, digest
from tests import nccl_manners, shared_gpus
from tests.chaos.styles import pauses, recording
from tests.chaos.styles.catalogue import STYLES

LARGE_BYTES = 64
"""With `--large`: from here on a tensor is treated like the weights of real models."""
NEWS_LATE_S = 0.1
"""With `--nccl-manners`: the longest that the announcement of a group takes to reach a worker."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("style")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--nccl-manners", action="store_true")
    options = parser.parse_args(arguments)
    shared_gpus.use()
    if options.nccl_manners:
        nccl_manners.use(news_late_s=NEWS_LATE_S)
    recording.install(recording.Recorder(options.out))
    if options.pace_s:
        pauses.install(pauses.Pauses(options.out, options.pace_s, options.steps))
    if options.large:
        cells.SMALL_BYTES = digest.LEAST_SAMPLED_BYTES = LARGE_BYTES
        digest.SAMPLED_BYTES, digest.SAMPLED_OF = 8, LARGE_BYTES
    module = importlib.import_module(f"tests.chaos.styles.scripts.{STYLES[options.style].module}")
    getattr(module, options.style)(options.epochs)


if __name__ == "__main__":
    main()
