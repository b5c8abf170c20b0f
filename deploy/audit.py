"""Asks pip-audit about known vulnerabilities of locked packages, and says what was not checked.

python deploy/audit.py deploy/locked.txt     # exit code 1: vulnerable; 75: not all was checked
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

VULNERABLE, TEMPORARY = 1, 75


def verdict(report: dict[str, Any]) -> tuple[int, list[str]]:
    """The exit code, and lines that say what is vulnerable and what was not checked."""
    packages = report["dependencies"]
    lines = [
        f"{one['name']} {one['version']}: {found['id']}, fixed in "
        f"{', '.join(found['fix_versions']) or 'no version yet'}"
        for one in packages
        for found in one.get("vulns", ())
    ]
    skipped = [one for one in packages if "skip_reason" in one]
    code = VULNERABLE if lines else TEMPORARY if skipped else 0
    if skipped:
        names = ", ".join(one["name"] for one in skipped)
        lines.append(
            f"not checked: {len(skipped)} of {len(packages)} packages, since the service does not "
            f"know them or a mirror stands in for it ({names})"
        )
    else:
        lines.append(f"checked: {len(packages)} packages")
    return code, lines


def main() -> int:
    """Audit the files that the command line names; return the exit code."""
    command = [str(Path(sys.executable).with_name("pip-audit")), "--progress-spinner=off"]
    command += ["--disable-pip", "--require-hashes", "--format=json"]
    command += [f"--requirement={name}" for name in sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        code, lines = verdict(json.loads(done.stdout))
    except (ValueError, KeyError):
        why = (done.stderr.strip() or "no reason").splitlines()[-1]
        code, lines = TEMPORARY, [f"not checked: the service cannot be reached ({why[:300]})"]
    print(*lines, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
