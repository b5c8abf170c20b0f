"""Builds what is preloaded, and says when it cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parent / "failing_calls.c"


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return shutil.which("cc") or shutil.which("gcc")


def require_compiler() -> None:
    """Skips the test without one; where CI=true it fails."""
    if compiler() is not None:
        return
    missing = "needs a C compiler, `cc` or `gcc`, to build tests/faults/failing_calls.c"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def build(folder: Path) -> Path:
    """The library, made in the folder."""
    found = compiler()
    assert found is not None, "no C compiler"
    library = folder / "failing_calls.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    libraries = ["-ldl", "-lpthread"]
    subprocess.run([found, *flags, "-o", library, _SOURCE, *libraries], check=True)
    return library
