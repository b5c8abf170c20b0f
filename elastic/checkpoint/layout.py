"""Makes and parses the names of files and directories inside a checkpoint directory.

ROOT/
└── step-000001200/
    ├── shard-00000-of-00004-g7-5fa5c435.safetensors   the first share of the tensors' bytes
    ├── ...
    ├── structure-g7-5fa5c435.json     names and shapes of the tensors, and all other values
    └── manifest.json                  written last: its presence is the commit

"g7-5fa5c435" names the group that saved, by generation and run. Files of several groups may lie
side by side and never replace each other; only those that the manifest lists count. Names of
format version 1 lack the group.
"""

from __future__ import annotations

import re

MANIFEST = "manifest.json"

_STEP_DIRECTORY = re.compile(r"step-(\d{9,})", re.ASCII)
_GROUP = r"(?:-g\d+-(?P<run>[0-9a-z]{1,8}))?"
_SHARD = re.compile(rf"shard-(\d{{5,}})-of-(\d{{5,}}){_GROUP}\.safetensors", re.ASCII)
_STRUCTURE = re.compile(rf"structure{_GROUP}\.json", re.ASCII)
_NOT_IN_RUN = re.compile(r"[^0-9a-z]", re.ASCII)


def step_directory_name(step: int) -> str:
    """Return "step-000001200" for 1200 committed steps; names sort as steps do below 10^9."""
    assert step >= 0, f"a step count is never negative: {step}"
    return f"step-{step:09d}"


def parse_step_directory_name(name: str) -> int | None:
    """Return the step, or None if `step_directory_name` does not make this name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    if match is None:
        return None
    step = int(match.group(1))
    return step if step_directory_name(step) == name else None


def group_name(generation: int, run: str) -> str:
    """Return "g7-5fa5c435" for generation 7 of the run (the job's incarnation) "5fa5c435b28b...".

    The generation alone does not identify a group: every run counts its generations from 1.
    """
    return f"g{generation}-{run_tag(run)}"


def run_tag(run: str) -> str:
    """Return "5fa5c435", which names the run "5fa5c435b28b..." in a checkpoint directory."""
    return _NOT_IN_RUN.sub("", run.lower())[:8] or "0"


def run_tag_in(name: str) -> str:
    """Return the run in the name of a group's file; empty for other names and those of version 1,
    which lack it."""
    match = _SHARD.fullmatch(name) or _STRUCTURE.fullmatch(name)
    return (match["run"] or "") if match is not None else ""


def shard_name(index: int, count: int, group: str) -> str:
    """Return "shard-00000-of-00004-g7-5fa5c435.safetensors" for shard 0 of 4 of a group."""
    assert 0 <= index < count, f"shard {index} of {count} does not exist"
    return f"shard-{index:05d}-of-{count:05d}-{group}.safetensors"


def structure_name(group: str) -> str:
    """Return "structure-g7-5fa5c435.json"."""
    return f"structure-{group}.json"


def is_of_group(name: str, group: str) -> bool:
    """Return whether the group of this name saved the file of this name."""
    is_own = parse_shard_name(name) is not None or is_structure_name(name)
    return is_own and f"-{group}." in name


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """Return (index, count) from the name of any group's shard; None for any other name."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    index, count = int(match.group(1)), int(match.group(2))
    canonical = name.startswith(f"shard-{index:05d}-of-{count:05d}")
    return (index, count) if index < count and canonical else None


def is_structure_name(name: str) -> bool:
    return _STRUCTURE.fullmatch(name) is not None


def partial_name(name: str, token: str) -> str:
    """Return the name that a file has while it is written; `token` makes it unique."""
    return f".{name}.{token}.partial"


def is_of_step(name: str) -> bool:
    """Return whether we give files in a step's directory such names, or a save left it there."""
    return (
        name == MANIFEST
        or parse_shard_name(name) is not None
        or is_structure_name(name)
        or (name.startswith(".") and name.endswith(".partial"))
    )


def path_in_step(step: int, name: str) -> str:
    return f"{step_directory_name(step)}/{name}"
