"""Generates elastic/v1 from protos/: `python -m tests.protos`; the freshness test uses it too."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "protos" / "elastic" / "v1"
WITH_SERVICES = ("control.proto",)


def generate(target: Path) -> None:
    """Write the generated modules below `target`."""
    for source in sorted(SOURCES.glob("*.proto")):
        options = [f"--python_out={target}", f"--pyi_out={target}"]
        if source.name in WITH_SERVICES:
            options.append(f"--grpc_python_out={target}")
        status = protoc.main(["protoc", f"-I{ROOT / 'protos'}", *options, str(source)])
        if status != 0:
            sys.exit(status)


if __name__ == "__main__":
    generate(ROOT)
