"""Runs a job in which one call fails, and finds what is wrong with its end."""

from __future__ import annotations

import ast
import contextlib
import shutil
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elastic.errors import ExitCode
from examples.ledger_check import audit
from tests.faults.armed import ArmedPoint
from tests.faults.judging import (
    bare_tracebacks,
    damaged_checkpoints,
    left_behind,
    logs_below,
    said_by,
    text_of,
    wrong_words,
)
from tests.faults.points import FUNCTIONS, Counts, Point
from tests.integration.running import Place
from tests.job_process import ROOT, JobProcess

JOB = Path(__file__).parent / "job.py"
SAMPLES, EPOCHS = 96, 3
UNDER = "/tmp/el-"  # the paths of a Place and of the folders made here begin so
_DEADLINE_S = 90.0
_TOLERANCE = 1e-9


@dataclass(kw_only=True)
class Outcome:
    """How one job ended."""

    point: Point | None
    fired: str
    """The call that failed; empty if none reached the point."""
    error: int | None
    exit_code: int | None
    took_s: float
    ends_job: bool = False
    wrong: list[str] = field(default_factory=list)
    story: str = ""
    weights: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)

    @property
    def line(self) -> str:
        verdict = "FAIL" if self.wrong else "ok  " if self.fired or not self.point else "miss"
        end = f"exit {self.exit_code}, {self.took_s:4.1f} s"
        return f"{verdict} {self.point!s:34} {end}  {self.fired}"


def undisturbed(library: Path) -> Outcome:
    """A job without a fault, for its counts of calls and the right weights."""
    outcome = attempt(library, None, [])
    assert not outcome.wrong, f"{outcome.wrong}\n{outcome.story}"
    return outcome


def attempt(library: Path, point: Point | None, weights: list[float]) -> Outcome:
    """Run one job. weights: those that it must have if it ends well; empty: any."""
    with new_place() as place:
        began = time.monotonic()
        job, armed = _start(place, library, point)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(_DEADLINE_S)
        outcome = Outcome(
            point=point,
            fired=armed.fired.about if armed.fired is not None else "",
            error=armed.fired.error if armed.fired is not None else None,
            exit_code=job.process.poll(),
            took_s=time.monotonic() - began,
            counts=counts_in(place.files / "calls"),
        )
        outcome.wrong += left_behind(place) if outcome.exit_code is not None else []
        job.close()
        with contextlib.suppress(ValueError, SyntaxError):
            outcome.weights = ast.literal_eval(text_of(place.files / "weights"))
        outcome.wrong += _wrong_end(place, job, outcome, weights or outcome.weights)
        logs = logs_below([place.files / "logs"])
        outcome.story = f"{outcome.fired}\n{job.story()}\n{logs}"
        return outcome


@contextlib.contextmanager
def new_place() -> Iterator[Place]:
    files = Path(tempfile.mkdtemp(prefix="el-", dir="/tmp"))
    place = Place(files)
    try:
        yield place
    finally:
        place.kill_all()
        shutil.rmtree(files, ignore_errors=True)
        shutil.rmtree(place.sockets, ignore_errors=True)


def _start(place: Place, library: Path, point: Point | None) -> tuple[JobProcess, ArmedPoint]:
    calls = place.files / "calls"
    calls.mkdir()
    armed = ArmedPoint(calls)
    if point is not None:
        armed.arm(point)
    checkpoints, ledger = place.files / "checkpoints", place.files / "ledger.jsonl"
    options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "5", "--ledger", ledger]
    options += ["--hang-timeout-s", "20", "--start-timeout-s", "60", "--stop-grace-s", "10"]
    job = place.start(
        JOB,
        place.files / "weights",
        options=options,
        PYTHONPATH=str(ROOT),
        LD_PRELOAD=str(library),
        FAULTS_FOLDER=str(calls),
        FAULTS_UNDER=UNDER,
    )
    return job, armed


def _wrong_end(place: Place, job: JobProcess, outcome: Outcome, weights: list[float]) -> list[str]:
    if outcome.exit_code is None:
        return [f"it hangs: still running after {_DEADLINE_S} s"]
    wrong = bare_tracebacks(job) + damaged_checkpoints(place.files / "checkpoints")
    if outcome.exit_code != ExitCode.OK:
        errors = {outcome.error} if outcome.error is not None else set()
        return wrong + wrong_words(outcome.exit_code, said_by(job), errors)
    lines = text_of(place.files / "ledger.jsonl").splitlines()
    wrong += [f"ledger: {p}" for p in audit(lines, samples=SAMPLES, epochs=EPOCHS).problems]
    found = outcome.weights
    equal = len(found) == len(weights) and all(
        abs(a - b) <= _TOLERANCE for a, b in zip(found, weights, strict=True)
    )
    return wrong if equal else [*wrong, "the weights are not those of an undisturbed job"]


def counts_in(folder: Path) -> Counts:
    most: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*.*"):
        values = struct.unpack(f"={len(FUNCTIONS)}I", path.read_bytes())
        for function, value in zip(FUNCTIONS, values, strict=True):
            kind = (path.name.partition(".")[0], function)
            most[kind] = max(most[kind], value)
    return most
