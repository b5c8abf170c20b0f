"""Adds to the wheel what pyproject.toml cannot: files of the repository outside the package."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CARRIED = ("CHANGELOG.md", "README.md", "deploy", "docs", "helm", "protos")
"""Copied into elastic/carried, where `elastic files` finds them."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "packages")


class BuildWithFiles(build_py):
    """Copies the files of `CARRIED` too. An editable install finds them beside the package."""

    def run(self) -> None:
        """Copy the files, but not for an editable install."""
        super().run()
        if self.editable_mode:
            return
        for name in CARRIED:
            target = Path(self.build_lib) / "elastic" / "carried" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                self.copy_file(str(ROOT / name), str(target))
                continue
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / name, target, ignore=LEFT_OUT)


with tempfile.TemporaryDirectory() as scratch:  # `pip install .` leaves no build/ in the checkout
    setup(
        cmdclass={"build_py": BuildWithFiles},
        options={"build": {"build_base": scratch}},
    )
