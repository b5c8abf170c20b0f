"""Turns a report of pip's resolver into a file with versions and hashes. `make locked` runs it.

    pip install --dry-run --ignore-installed --report - . | python deploy/locked.py [FILE]

Packages that FILE names, too, get its versions: the image has those with which the tests ran.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = "# Versions and hashes for Python 3.11 on x86-64, without torch: see docs/SECURITY.md"
_OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")


def locked(report: dict[str, Any], before: Iterable[str] = ()) -> list[str]:
    """One line for each package that came from an archive, but torch and what its CUDA builds bring
    along: these differ by index. `before` are lines of another file, which count more."""
    known = {line.partition("==")[0]: line for line in before}
    lines = []
    for one in report["install"]:
        name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
        archive = one["download_info"].get("archive_info")
        if archive is not None and not _OF_TORCH.fullmatch(name):
            line = f"{name}=={one['metadata']['version']} --hash=sha256:"
            lines.append(known.get(name, line + archive["hashes"]["sha256"]))
    return sorted(lines)


if __name__ == "__main__":
    before = Path(sys.argv[1]).read_text().splitlines() if sys.argv[1:] else []
    print(HEAD, *locked(json.load(sys.stdin), before), sep="\n")
