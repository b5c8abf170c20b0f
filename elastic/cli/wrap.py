"""`elastic wrap`: runs a command that calls torchrun in its process, with elastic in its place."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence

from elastic.cli.torchrun import launch
from elastic.errors import ConfigurationError
from elastic.runtime.output import never_blocking
from elastic.settings.sources import DeviceCounts
from elastic.settings.torchrun import options_of

_TORCHRUN = "torch.distributed.run"


def wrap(command: Sequence[str], device_counts: Callable[[], DeviceCounts]) -> None:
    """Run the Python program `command`, such as `accelerate launch ...`, in this process, where
    torch.distributed.run.run starts jobs as `elastic torchrun` does.

    Raises what the program raises, SystemExit with the code of a job that fails, and
    ConfigurationError.
    """
    path = _script(command)

    def run(arguments: argparse.Namespace) -> None:
        with never_blocking():
            code = launch(options_of(arguments, os.environ), device_counts)
        if code != 0:
            raise SystemExit(code)

    try:
        # By its name: only workers may import torch, except for a program that does so itself.
        torchrun = importlib.import_module(_TORCHRUN)
    except ImportError as error:
        raise ConfigurationError(f"{_TORCHRUN} cannot be imported: {error}") from error
    torchrun.run = run  # type: ignore[attr-defined]
    sys.argv = list(command)
    runpy.run_path(path, run_name="__main__")


def _script(command: Sequence[str]) -> str:
    """Return the path of the command's program. Raises ConfigurationError if it is no script."""
    path = shutil.which(command[0]) if command else None
    if path is None:
        what = f"{command[0]!r} is not on the PATH" if command else "no command is given"
        raise ConfigurationError(
            f"{what}; give a command that starts jobs by torchrun: elastic wrap accelerate launch "
            "train.py"
        )
    with open(path, "rb") as file:
        first = file.readline(200)
    if b"python" not in first or not first.startswith(b"#!"):
        raise ConfigurationError(
            f"{path} is not a Python script, so torchrun cannot be replaced in its process; if it "
            "starts torchrun as a process, put a file named torchrun before it on the PATH: "
            '#!/bin/sh, and exec elastic torchrun "$@"'
        )
    return path
