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
from tests.sim.mutants.survey import Known, Survey

ROOT = Path(__file__).parents[3]
ENOUGH = 0.9
_UNIT_TESTS = ("tests/unit/core", "tests/scenarios")
_PATIENCE_S = 0.5  # for each history


class Verdict(NamedTuple):
    """The result of one mutant's trial."""

    mutant: Mutant
    histories: int
    found: str
    """The simulator's first violation; empty: it has found none."""
    history: str
    changed: int = 0
    """In how many histories the fault changed anything."""
    in_unit_tests: bool | None = None
    """Whether unit tests find a fault that the simulator misses; None: not tried."""

    def line(self) -> str:
        where = f"{self.mutant.file.removesuffix('.py'):<22}"
        if self.found:
            by = self.found.partition(":")[0]
            how = f"{by} after {self.histories} ({self.history})"
        else:
            how = f"SURVIVED {self.histories}, {self.changed} changed"
            how += {None: "", True: ", unit tests fail", False: ", unit tests pass"}[
                self.in_unit_tests
            ]
        return f"{where} {how:<40} {self.mutant.breaks}"


def try_mutants(
    mutants: Sequence[Mutant], *, histories: int, tries: int, jobs: int, unit_tests: bool
) -> Iterator[Verdict]:
    """Yield the verdict on each mutant, in their order. Of `histories`, each is tried on at most
    `tries` that come to its place. Raises ValueError if a mutant does not fit the source."""
    for mutant in mutants:
        mutant.plant(_source(ROOT, mutant).read_text())  # raises before any trial
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        places: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            places.put(_copied(Path(scratch) / str(job)))
        survey = _survey(Path(scratch) / "0", histories)

        def try_one(mutant: Mutant) -> Verdict:
            place = places.get()
            known = survey.histories_for(mutant, _source(ROOT, mutant).read_text())[:tries]
            try:
                return _try(mutant, place, known, unit_tests=unit_tests)
            finally:
                places.put(place)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(try_one, mutants)


def _copied(place: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("elastic", "tests"):
        shutil.copytree(ROOT / folder, place / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", place)
    return place


def _survey(place: Path, histories: int) -> Survey:
    ended = _run(("-m", "tests.sim.mutants.survey", str(histories)), place)
    if ended.returncode != 0:
        raise ValueError(ended.stderr[-1000:])
    sys.stderr.write(ended.stderr)  # names histories that fail without any fault
    return Survey(json.loads(ended.stdout))


def _try(mutant: Mutant, place: Path, known: Sequence[Known], *, unit_tests: bool) -> Verdict:
    file = _source(place, mutant)
    sound = file.read_text()
    file.write_text(mutant.plant(sound))
    try:
        verdict = _hunt(mutant, place, known)
        if verdict.found or not unit_tests:
            return verdict
        return verdict._replace(in_unit_tests=_unit_tests_fail(place))
    finally:
        file.write_text(sound)


def _hunt(mutant: Mutant, place: Path, known: Sequence[Known]) -> Verdict:
    patience_s = 30.0 + _PATIENCE_S * len(known)
    try:
        ended = _run(
            ("-m", "tests.sim.mutants.hunt"),
            place,
            asks=json.dumps(known),
            patience_s=patience_s,
        )
    except subprocess.TimeoutExpired:
        return Verdict(mutant, len(known), "never ends", "")
    if ended.returncode != 0:
        return Verdict(mutant, 0, f"import: {ended.stderr[-300:]}", "")
    return Verdict(mutant, **json.loads(ended.stdout))


def _unit_tests_fail(place: Path) -> bool:
    return (
        _run(("-m", "pytest", "-x", "-p", "no:cacheprovider", *_UNIT_TESTS), place).returncode == 1
    )


def _run(
    arguments: Sequence[str], place: Path, *, asks: str = "", patience_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    # Two faults of one size, planted within a second, would share a compiled file.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(place)}
    return subprocess.run(
        (sys.executable, *arguments),
        cwd=place,
        env=environment,
        input=asks,
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )


def _source(root: Path, mutant: Mutant) -> Path:
    return root / "elastic" / "core" / mutant.file
