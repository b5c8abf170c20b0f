"""Turns torch's flight recorder off where it records gloo's collectives for nobody."""

from __future__ import annotations

from collections.abc import MutableMapping

# Read by torch when it first records something (torch 2.13; the second is the older name).
_ENTRIES = "TORCH_FR_BUFFER_SIZE"
_NAMES = (_ENTRIES, "TORCH_NCCL_TRACE_BUFFER_SIZE")


def turn_off(environment: MutableMapping[str, str]) -> None:
    """Keep no record, unless the script's environment asks for one.

    Before the first group of a process is built. The recorder takes the stack of each collective,
    which costs a microsecond and 2.5 MiB, and never forgets a group: 256 bytes for each that a
    worker has been in. Nothing reads it: of a hang `elastic stacks` tells more.
    """
    if not any(name in environment for name in _NAMES):
        environment[_ENTRIES] = "0"
