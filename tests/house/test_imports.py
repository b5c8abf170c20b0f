"""The import contracts hold, each finds a planted violation, and there is no circle."""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "elastic").rglob("*.py")
}
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
# One violation of each contract, planted in a copy of the code.
PLANTED = {
    "Layers point downward": ("elastic/rpc/codec.py", "import elastic.agent.logs"),
    "The core is pure": ("elastic/core/data_order.py", "import random"),
    "Only the worker may import torch": ("elastic/agent/logs.py", "import torch"),
    "Frameworks are optional": ("elastic/worker/loops.py", "import lightning"),
    "No grpc in a worker process": ("elastic/worker/step.py", "import grpc"),
    "What decides imports no book and no view": (
        "elastic/core/restarts.py",
        "import elastic.core.book.book",
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "elastic", tmp_path / "elastic", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def verdicts(directory: Path) -> dict[str, str]:
    """Return KEPT or BROKEN for each contract."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {LINT}", "--no-cache"],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^(.+) (KEPT|BROKEN)", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return dict(found)


def test_the_contracts_hold_and_each_finds_a_planted_violation(copy: Path) -> None:
    before = verdicts(copy)
    assert set(before) == set(PLANTED)
    assert set(before.values()) == {"KEPT"}
    for file, violation in PLANTED.values():
        path = copy / file
        future = "from __future__ import annotations\n"
        path.write_text(path.read_text().replace(future, f"{future}{violation}\n", 1))
    assert set(verdicts(copy).values()) == {"BROKEN"}


def imported_by(path: Path) -> set[str]:
    """Return the modules of elastic that a module imports, also where only a type checker does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & MODULES.keys()


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {name: imported_by(path) for name, path in MODULES.items()}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
