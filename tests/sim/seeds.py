"""Reads seeds.txt: the seeds that once failed, or that show a planted fault."""

from __future__ import annotations

from pathlib import Path


def _read(line: str) -> tuple[int, str]:
    seed, _, stress = line.split(maxsplit=1)[0].partition("/")
    return int(seed), stress


ONCE_FAILED = [
    _read(line)
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
    if line and not line.startswith("#")
]
