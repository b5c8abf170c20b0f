"""Parses options and reports results for every benchmark: a table on the terminal, a JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark; --help shows `description` with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column names the row, the others are figures."""
    table = Table(box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(f"\n{title}", style="bold")
    console.print(table)


def save(name: str, document: dict[str, Any]) -> Path:
    """Write `document`, with time, machine and command, to a file in RESULTS; return the file."""
    RESULTS.mkdir(exist_ok=True)
    now = datetime.datetime.now().astimezone()
    path = RESULTS / f"{name}-{now:%Y%m%d-%H%M%S}.json"
    where = {"measured": now.isoformat(timespec="seconds"), "machine": _machine()}
    path.write_text(json.dumps(where | document, indent=2) + "\n")
    print(f"written to {path}")
    return path


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds(values: Sequence[float], *, digits: int = 3) -> list[str]:
    """Return median, minimum and maximum as cells of a table; dashes without values."""
    return [f"{value:.{digits}f}" for value in spread(values).values()] if values else ["–"] * 3


def _machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "command": shlex.join(sys.orig_argv),
        "load_1min": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
