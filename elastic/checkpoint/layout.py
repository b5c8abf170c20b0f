"""The names of things inside a checkpoint directory.

ROOT/
└── step-000001200/
    ├── shard-00000-of-00004.safetensors   the first share of the tensors' bytes
    ├── ...
    ├── structure.json                     which tensors there are, and what surrounds them
    └── manifest.json                      written last: its presence is the commit
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
STRUCTURE = "structure.json"

_STEP_DIRECTORY = re.compile(r"step-(\d{9,})", re.ASCII)
_SHARD = re.compile(r"shard-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII)


def step_directory_name(step: int) -> str:
    """Return "step-000001200" for 1200 committed steps; names sort as steps do below 10^9."""
    assert step >= 0, f"a step count is never negative: {step}"
    return f"step-{step:09d}"


def parse_step_directory_name(name: str) -> int | None:
    """Return the step of a name made by `step_directory_name`, None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    if match is None:
        return None
    step = int(match.group(1))
    return step if step_directory_name(step) == name else None


def shard_name(index: int, count: int) -> str:
    """Return "shard-00000-of-00004.safetensors" for shard 0 of 4."""
    assert 0 <= index < count, f"shard {index} of {count} does not exist"
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """Return (index, count) of a name made by `shard_name`, None for any other name."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    index, count = int(match.group(1)), int(match.group(2))
    return (index, count) if index < count and shard_name(index, count) == name else None


def path_in_step(step: int, name: str) -> str:
    """Return the path of one of a checkpoint's files, relative to the root."""
    return f"{step_directory_name(step)}/{name}"
