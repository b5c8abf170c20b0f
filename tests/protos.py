"""Generates modules from protos/: `python -m tests.protos`; the freshness test uses it too."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "protos"
WITH_SERVICES = ("control.proto",)  # etcd's methods have paths of etcd's own package


def generate(target: Path) -> None:
    """Write the generated modules below `target`, each where its source lies below protos/."""
    for source in sorted(PROTOS.rglob("*.proto")):
        options = [f"--python_out={target}", f"--pyi_out={target}"]
        if source.name in WITH_SERVICES:
            options.append(f"--grpc_python_out={target}")
        status = protoc.main(["protoc", f"-I{PROTOS}", *options, str(source)])
        if status != 0:
            sys.exit(status)


if __name__ == "__main__":
    generate(ROOT)
