"""Builds the preloaded library, and skips tests where that is impossible."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parent / "failing_calls.c"


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def require_compiler() -> None:
    """Skip the test on a machine without a C compiler; with CI=true fail it."""
    if compiler() is not None:
        return
    missing = "needs a C compiler, `cc` or `gcc`, to build tests/faults/failing_calls.c"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def build(folder: Path) -> Path:
    found = compiler()
    assert found is not None, "no C compiler"
    library = folder / "failing_calls.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    libraries = ["-ldl", "-lpthread"]
    subprocess.run([found, *flags, "-o", library, _SOURCE, *libraries], check=True)
    return library
