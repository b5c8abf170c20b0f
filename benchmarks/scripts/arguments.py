"""Parses the command line of the benchmarks' training scripts."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.scripts.mlp import SIZES
from benchmarks.scripts.styles import STYLES


def parse(description: str | None) -> argparse.Namespace:
    """Return the options; only torchrun's side uses `checkpoint` and `checkpoint_every`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--log-dir", type=Path, required=True, help="one file per worker goes here")
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--style", choices=STYLES, default="plain")
    parser.add_argument("--one-by-one", action="store_true", help="every side uses torch's loader")
    parser.add_argument("--tracked-mb", type=int, default=0, help="more state, which is frozen")
    parser.add_argument("--unlike", action="store_true", help="workers build other weights each")
    parser.add_argument("--held-mb", type=int, default=0, help="memory that is no state")
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--turns", type=Path, help="file with the number of steps allowed so far")
    parser.add_argument("--checkpoint", type=Path, help="saved here and resumed from")
    parser.add_argument(
        "--checkpoint-every", type=int, default=20, help="steps between checkpoints (20)"
    )
    return parser.parse_args()
