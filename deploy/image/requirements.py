"""Prints elastic's requirements, for an image layer that stays the same across its versions.

python requirements.py pyproject.toml --extras tensorboard     # one a line, for pip
python requirements.py --check-variant cuda                    # checks the installed torch
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def main() -> int:
    """Exit with 2, and a line that says what to do, for a wrong VARIANT or EXTRAS."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pyproject", type=Path, nargs="?")
    parser.add_argument("--extras", default="", help="separated by commas")
    parser.add_argument("--check-variant", metavar="VARIANT")
    options = parser.parse_args()
    if options.check_variant is not None:
        import torch  # noqa: PLC0415

        wrong = what_is_wrong(options.check_variant, torch.__version__, torch.version.cuda)
        if wrong:
            print(wrong, file=sys.stderr)
            return 2
    if options.pyproject is not None:
        project = tomllib.loads(options.pyproject.read_text(encoding="utf-8"))["project"]
        extras = [name for name in options.extras.split(",") if name]
        unknown = sorted(set(extras) - set(project["optional-dependencies"]))
        if unknown:
            known = ", ".join(sorted(project["optional-dependencies"]))
            print(f"EXTRAS has unknown names: {', '.join(unknown)}; use {known}", file=sys.stderr)
            return 2
        print(*requirements(project, extras), sep="\n")
    return 0


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements in the table `project` and in these extras; torch is one of them."""
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for name in extras for line in optional[name])]


def what_is_wrong(variant: str, version: str, cuda: str | None) -> str:
    """Return "" if the installed torch is of the kind that VARIANT says.

    `version`: the installed torch's; `cuda`: the CUDA version of its build, or None."""
    if variant not in ("cpu", "cuda"):
        return f"VARIANT={variant} is neither cpu nor cuda"
    if variant == "cpu" and cuda is not None:
        return (
            f"VARIANT=cpu, and torch {version} came with CUDA {cuda}: pass TORCH_INDEX_URL with "
            "the index of PyTorch's CPU builds, which pytorch.org names, or VARIANT=cuda"
        )
    if variant == "cuda" and cuda is None:
        return (
            f"VARIANT=cuda, and torch {version} came without CUDA: pass TORCH_INDEX_URL with the "
            "index of PyTorch's builds for your CUDA, which pytorch.org names, or VARIANT=cpu"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main())
