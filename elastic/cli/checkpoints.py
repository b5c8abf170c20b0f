"""`elastic checkpoint ls` and `elastic checkpoint verify`."""

from __future__ import annotations

import datetime
import sys
from typing import Any

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.cli.formats import print_json, print_table, require_format
from elastic.errors import CheckpointDamaged, ConfigurationError


def list_them(url: str, *, output: str) -> None:
    """Print what the directory holds. Raises ElasticError."""
    as_json = require_format(output)
    directory = open_directory(url)
    found = catalog.scan(directory)
    rows = [_row(directory, step) for step in found.committed]
    if as_json:
        print_json({"checkpoints": rows, "unfinished": list(found.uncommitted)})
        return
    if not rows:
        print(f"no committed checkpoint in {directory.url}")
    else:
        columns = ("step", "epoch", "generation", "world_size", "bytes", "created", "state")
        print_table(columns, [[row.get(c, "") for c in columns] for row in rows])
    for step in found.uncommitted:
        print(f"step {step}: unfinished, not a checkpoint; the next prune removes it")


def verify_them(url: str, *, step: int | None, output: str) -> int:
    """Compare every file with its digest; return the exit code. Raises ElasticError."""
    as_json = require_format(output)
    directory = open_directory(url)
    steps = catalog.list_checkpoints(directory)
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigurationError(f"no committed checkpoint of step {step} in {url}; found: {known}")
    chosen = steps if step is None else (step,)
    results = {s: [str(p) for p in _verify(directory, s)] for s in chosen}
    if as_json:
        print_json({str(s): problems for s, problems in results.items()})
    else:
        _print_results(results, directory.url)
    return 1 if any(results.values()) else 0


def _row(directory: CheckpointDirectory, step: int) -> dict[str, Any]:
    try:
        manifest = catalog.read_manifest(directory, step)
    except CheckpointDamaged as error:
        return {"step": step, "state": f"damaged: {error}"}
    created = datetime.datetime.fromtimestamp(manifest.created_unix_s, tz=datetime.timezone.utc)
    return {
        "step": step,
        "epoch": manifest.epoch,
        "generation": manifest.generation,
        "world_size": manifest.world_size,
        "bytes": sum(file.size_bytes for file in manifest.files),
        "created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "state": "committed",
    }


def _verify(directory: CheckpointDirectory, step: int) -> list[catalog.Problem]:
    """Show how far a long read is, where somebody watches."""
    total = 0
    shown = sys.stderr.isatty()

    def on_bytes(count: int) -> None:
        nonlocal total
        total += count
        if shown:
            print(f"\rstep {step}: {total / 2**20:.0f} MiB read", end="", file=sys.stderr)

    problems = catalog.verify(directory, step, on_bytes)
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    return problems


def _print_results(results: dict[int, list[str]], url: str) -> None:
    if not results:
        print(f"no committed checkpoint in {url}")
    for step, problems in results.items():
        print(f"step {step}: {'intact' if not problems else 'DAMAGED'}")
        for problem in problems:
            print(f"  {problem}")
