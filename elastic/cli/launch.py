"""How a script is to be started, from what it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from elastic.settings.shared import Launch

_PACKAGE = "elastic"


def is_classic(script: Path, launch: Launch) -> bool:
    """Was it written for torchrun? Unless told, it was if neither it nor any module beside it that
    it imports, in turn, imports elastic. One that is no Python is left to say so itself, once."""
    if launch is not Launch.AUTO:
        return launch is Launch.TORCHRUN
    directory = script.resolve().parent
    waiting, seen = [script], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            if path is script:
                return False
            continue
        for level, name in _imported(tree):
            if level == 0 and name.partition(".")[0] == _PACKAGE:
                return False
            waiting += _beside(path.parents[level - 1] if level else directory, name)
    return True


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Leading dots and the dotted names that follow them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            yield from ((node.level, module + alias.name) for alias in node.names)


def _beside(directory: Path, name: str) -> Iterator[Path]:
    """Where Python, which looks beside the script first, would find the module and its parents."""
    path = directory
    for part in name.split("."):
        path = path / part
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                yield file
