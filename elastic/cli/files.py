"""Commands that need no job: `elastic checkpoint` lists and verifies checkpoints, `elastic export`
writes the tensors of one as a plain file, and `elastic files` lists or copies the units, chart,
alert rules, protos and documents that come with elastic.
"""

from __future__ import annotations

import datetime
import fnmatch
import importlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import CheckpointDirectory, LocalDirectory, open_directory
from elastic.cli.formats import print_json, print_table, require_format, say
from elastic.errors import CheckpointDamaged, ConfigurationError, refusal_of


def list_checkpoints(url: str, *, output: str) -> None:
    """Print the checkpoints in the directory. Raises ElasticError."""
    as_json = require_format(output)
    directory = _opened(url)
    found = catalog.scan(directory)
    rows = [_row(directory, step) for step in found.committed]
    if as_json:
        print_json(
            {
                "checkpoints": rows,
                "unfinished": list(found.uncommitted),
                "superseded": list(found.superseded),
            }
        )
        return
    if not rows:
        say(f"no committed checkpoint in {directory.url}")
    else:
        columns = ("step", "epoch", "generation", "world_size", "bytes", "created", "state")
        print_table(columns, [[row.get(c, "") for c in columns] for row in rows])
    for step in found.uncommitted:
        say(f"step {step}: unfinished, not a checkpoint; the next prune removes it")
    for step in found.superseded:
        say(f"step {step}: the job has gone on from an earlier step; the next prune removes it")


def verify_checkpoints(url: str, *, step: int | None, output: str) -> int:
    """Compare every file with its digest; return 1 if one differs.

    Raises ElasticError, also if there is nothing to verify.
    """
    as_json = require_format(output)
    directory = _opened(url)
    steps = catalog.list_checkpoints(directory)
    if not steps:
        raise ConfigurationError(
            f"nothing was verified: there is no committed checkpoint in {directory.url}; check the "
            "path"
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigurationError(
            f"no committed checkpoint of step {step} in {directory.url}; found: {known}"
        )
    chosen = steps if step is None else (step,)
    results = {s: [str(p) for p in _verify(directory, s)] for s in chosen}
    if as_json:
        print_json({str(s): problems for s, problems in results.items()})
    else:
        for s, problems in results.items():
            say(f"step {s}: {'intact' if not problems else 'DAMAGED'}")
            for problem in problems:
                say(f"  {problem}")
    return 1 if any(results.values()) else 0


def export_weights(url: str, *, out: Path, step: int | None, name: str | None) -> None:
    """Write the tensors of a checkpoint to a safetensors file. Raises ElasticError."""
    _opened(url)
    # By its name: it imports torch, which no other command may.
    weights = importlib.import_module("elastic.worker.state.weights")
    found, count = weights.export(
        url, out, step=step, name=name, on_damaged=lambda reason: say(f"skipped: {reason}")
    )
    say(f"{out}: {count} tensors of the checkpoint of step {found}")


def _opened(url: str) -> CheckpointDirectory:
    """Open the directory. Raises ConfigurationError if it is not there, or is one checkpoint's."""
    directory = open_directory(url)
    if isinstance(directory, LocalDirectory) and _is_missing(directory.url):
        raise ConfigurationError(
            f"the checkpoint directory {directory.url} does not exist; check the path"
        )
    catalog.require_parent(directory)
    return directory


def _is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:  # listing it will raise it again
        return False
    return False


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
    """Verify one checkpoint, with the progress on standard error if that is a terminal."""
    total = 0
    shown = sys.stderr.isatty()

    def on_bytes(count: int) -> None:
        nonlocal total
        total += count
        if shown:
            sys.stderr.write(f"\rstep {step}: {total / 2**20:.0f} MiB read")

    problems = catalog.verify(directory, step, on_bytes)
    if shown:
        sys.stderr.write("\r\033[K")
    return problems


_FOLDERS = ("deploy", "docs", "helm", "protos")
_DOCUMENTS = ("CHANGELOG.md", "README.md")
_IGNORED = {"__pycache__", "packages"}
_EXECUTABLE = b"#!"


def carried_files(pattern: str | None, *, to: Path | None, output: str) -> None:
    """List the files that match `pattern`, or copy them below `to`. Raises ElasticError."""
    as_json = require_format(output)
    root = _root()
    found = [path for path in _carried(root) if pattern is None or _matches(path, pattern)]
    if not found:
        raise ConfigurationError(
            f"no file matches {pattern!r}; `elastic files` lists all files, and the name of a "
            "folder means all files in it"
        )
    if to is not None:
        _copy(root, found, to)
        return
    rows = [(str(path), (root / path).stat().st_size) for path in found]
    if as_json:
        print_json([{"file": name, "bytes": size} for name, size in rows])
    else:
        print_table(("file", "bytes"), rows)


def _root() -> Path:
    """The files' directory: in an installed package, or the repository that elastic runs from."""
    package = Path(__file__).parent.parent
    carried = package / "carried"
    return carried if carried.is_dir() else package.parent


def _carried(root: Path) -> Iterator[Path]:
    """The paths of all files, relative to `root`."""
    yield from (Path(name) for name in _DOCUMENTS if (root / name).is_file())
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root)
            if path.is_file() and not _IGNORED & {*relative.parts}:
                yield relative


def _matches(path: Path, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    return fnmatch.fnmatchcase(str(path), pattern) or any(
        fnmatch.fnmatchcase(str(parent), pattern) for parent in path.parents
    )


def _copy(root: Path, found: list[Path], to: Path) -> None:
    """Copy all files, or none if one of them exists already."""
    there = [str(to / path) for path in found if os.path.lexists(to / path)]
    if there:
        raise ConfigurationError(
            f"{', '.join(there[:3])} would be overwritten ({len(there)} in all); give another "
            "directory, or move them away"
        )
    for path in found:
        target, content = to / path, (root / path).read_bytes()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            if content.startswith(_EXECUTABLE):  # zip files lose the mode
                target.chmod(stat.S_IMODE(target.stat().st_mode) | 0o111)
        except OSError as error:
            raise refusal_of(
                f"cannot write {target}: {error.strerror}; choose another directory", error
            ) from error
        say(str(target))
