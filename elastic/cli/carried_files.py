"""`elastic files`: units, the chart, alert rules, protos and documents that come with it."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from elastic.cli.formats import print_json, print_table, require_format
from elastic.errors import ConfigurationError, refusal_of

_FOLDERS = ("deploy", "docs", "helm", "protos")
_DOCUMENTS = ("CHANGELOG.md", "README.md")
_IGNORED = {"__pycache__", "packages"}
_EXECUTABLE = b"#!"


def files(pattern: str | None, *, to: Path | None, output: str) -> None:
    """List those that match, or copy them below `to`. Raises ElasticError."""
    as_json = require_format(output)
    root = _root()
    found = [path for path in _carried(root) if pattern is None or _matches(path, pattern)]
    if not found:
        raise ConfigurationError(
            f"no file matches {pattern!r}; `elastic files` lists them all, and a folder stands for "
            "all that is in it"
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
    """In the installed package; beside it, where it is run from its repository."""
    package = Path(__file__).parent.parent
    carried = package / "carried"
    return carried if carried.is_dir() else package.parent


def _carried(root: Path) -> Iterator[Path]:
    """Relative to the root, by name."""
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
    """All or, if one of them is there already, none."""
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
            if content.startswith(_EXECUTABLE):  # zip files forget it
                target.chmod(stat.S_IMODE(target.stat().st_mode) | 0o111)
        except OSError as error:
            raise refusal_of(
                f"cannot write {target}: {error.strerror}; choose another directory", error
            ) from error
        print(target)
