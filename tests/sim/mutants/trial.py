"""Plants each fault of the catalogue in a copy of the source and lets the simulator look for it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.sim.mutants.catalogue import Mutant

ROOT = Path(__file__).parents[3]
ENOUGH = 0.9
_UNIT_TESTS = ("tests/unit/core", "tests/scenarios")
_PATIENCE_S = 300.0


class Verdict(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    histories: int
    found: str
    """What the simulator says; empty: it has found nothing."""
    history: str
    in_unit_tests: bool | None = None
    """Do these find what the simulator does not? None: not asked."""

    def line(self) -> str:
        where = f"{self.mutant.file.removesuffix('.py'):<22}"
        if self.found:
            by = self.found.partition(":")[0]
            how = f"{by} after {self.histories} ({self.history})"
        else:
            how = f"SURVIVED {self.histories}"
            how += {None: "", True: ", unit tests fail", False: ", unit tests pass"}[
                self.in_unit_tests
            ]
        return f"{where} {how:<40} {self.mutant.breaks}"


def tried(
    mutants: Sequence[Mutant], *, histories: int, jobs: int, unit_tests: bool
) -> Iterator[Verdict]:
    """What becomes of each, in their order."""
    for mutant in mutants:
        mutant.plant(_source(ROOT, mutant).read_text())  # all can be, or none is tried
    sound = Mutant("ranks.py", "", "", "nothing")
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        places: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            places.put(_copied(Path(scratch) / str(job)))

        def try_one(mutant: Mutant) -> Verdict:
            place = places.get()
            try:
                return _try(mutant, place, histories, unit_tests=unit_tests)
            finally:
                places.put(place)

        if (false := _hunt(sound, Path(scratch) / "0", histories)).found:
            raise ValueError(f"{false.history} fails without any fault: {false.found}")
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(try_one, mutants)


def _copied(place: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("elastic", "tests"):
        shutil.copytree(ROOT / folder, place / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


def _try(mutant: Mutant, place: Path, histories: int, *, unit_tests: bool) -> Verdict:
    file = _source(place, mutant)
    sound = file.read_text()
    file.write_text(mutant.plant(sound))
    try:
        verdict = _hunt(mutant, place, histories)
        if verdict.found or not unit_tests:
            return verdict
        return verdict._replace(in_unit_tests=_unit_tests_fail(place))
    finally:
        file.write_text(sound)


def _hunt(mutant: Mutant, place: Path, histories: int) -> Verdict:
    command = (sys.executable, "-m", "tests.sim.mutants.hunt", str(histories), mutant.file)
    try:
        ended = _run(command, place)
    except subprocess.TimeoutExpired:
        return Verdict(mutant, histories, "never ends", "")
    if ended.returncode != 0:
        return Verdict(mutant, 0, f"import: {ended.stderr[-300:]}", "")
    result = json.loads(ended.stdout)
    return Verdict(mutant, result["histories"], result["found"], result["history"])


def _unit_tests_fail(place: Path) -> bool:
    command = (sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *_UNIT_TESTS)
    return _run(command, place).returncode == 1


def _run(command: Sequence[str], place: Path) -> subprocess.CompletedProcess[str]:
    # Two faults of one size, planted within a second, would share a compiled file.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(place)}
    return subprocess.run(
        command,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )


def _source(root: Path, mutant: Mutant) -> Path:
    return root / "elastic" / "core" / mutant.file
