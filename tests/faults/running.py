"""Runs a job in which one call fails, and says what is wrong with its end."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import open_directory
from elastic.errors import ElasticError, ExitCode
from examples.ledger_check import audit
from tests.faults.points import FUNCTIONS, Counts, Point
from tests.integration.running import Place, command_line
from tests.job_process import ROOT, JobProcess

JOB = Path(__file__).parent / "job.py"
SAMPLES, EPOCHS = 96, 3
_UNDER = "/tmp/el-"  # where the folders of Place and those made here begin
_DEADLINE_S = 90.0
_GONE_WITHIN_S = 20.0
_CLEAN = {ExitCode.SCRIPT_FAILED, ExitCode.TEMPORARY, ExitCode.CONFIGURATION}
_TOLERANCE = 1e-9


@dataclass(kw_only=True)
class Outcome:
    """How one job ended."""

    point: Point | None
    fired: str
    """Which call it was that failed; empty if none came to it."""
    exit_code: int | None
    took_s: float
    wrong: list[str] = field(default_factory=list)
    story: str = ""
    weights: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)

    @property
    def line(self) -> str:
        """In short."""
        verdict = "FAIL" if self.wrong else "ok  " if self.fired or not self.point else "miss"
        fired = self.fired.rpartition("thread ")[2]
        return f"{verdict} {self.point!s:34} exit {self.exit_code}, {self.took_s:4.1f} s  {fired}"


def undisturbed(library: Path) -> Outcome:
    """Counts the calls and gives the right weights."""
    outcome = attempt(library, None, [])
    assert not outcome.wrong, f"{outcome.wrong}\n{outcome.story}"
    return outcome


def attempt(library: Path, point: Point | None, weights: list[float]) -> Outcome:
    """One job; `weights`: what it must end with, if it ends well."""
    with _place() as place:
        began = time.monotonic()
        job = _start(place, library, point)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(_DEADLINE_S)
        outcome = Outcome(
            point=point,
            fired=_text(place.files / "calls" / "fired").strip(),
            exit_code=job.process.poll(),
            took_s=time.monotonic() - began,
            counts=_counts(place.files / "calls"),
        )
        outcome.wrong += _left_behind(place) if outcome.exit_code is not None else []
        job.close()
        with contextlib.suppress(ValueError, SyntaxError):
            outcome.weights = ast.literal_eval(_text(place.files / "weights"))
        outcome.wrong += _wrong_end(place, job, outcome, weights or outcome.weights)
        outcome.story = f"{outcome.fired}\n{job.story()}\n{_logs(place)}"
        return outcome


@contextlib.contextmanager
def _place() -> Iterator[Place]:
    files = Path(tempfile.mkdtemp(prefix="el-", dir="/tmp"))
    place = Place(files)
    try:
        yield place
    finally:
        place.kill_all()
        shutil.rmtree(files, ignore_errors=True)
        shutil.rmtree(place.sockets, ignore_errors=True)


def _start(place: Place, library: Path, point: Point | None) -> JobProcess:
    calls = place.files / "calls"
    calls.mkdir()
    told = f"{point.role} {point.function} {point.number} {point.error}" if point else ""
    checkpoints, ledger = place.files / "checkpoints", place.files / "ledger.jsonl"
    options = ["--checkpoint-dir", checkpoints, "--checkpoint-every", "5", "--ledger", ledger]
    options += ["--hang-timeout-s", "20", "--start-timeout-s", "60", "--stop-grace-s", "10"]
    return place.start(
        JOB,
        place.files / "weights",
        options=options,
        PYTHONPATH=str(ROOT),
        LD_PRELOAD=str(library),
        FAULTS_FOLDER=str(calls),
        FAULTS_UNDER=_UNDER,
        FAULTS_POINT=told,
    )


def _left_behind(place: Place) -> list[str]:
    ends_at = time.monotonic() + _GONE_WITHIN_S
    while (place.processes() or place.run_directories()) and time.monotonic() < ends_at:
        time.sleep(0.02)
    processes = [f"{pid} {command_line(pid)}" for pid in place.processes()]
    wrong = [f"processes are left: {processes}"] if processes else []
    directories = place.run_directories()
    return wrong + ([f"directories are left: {directories}"] if directories else [])


def _wrong_end(place: Place, job: JobProcess, outcome: Outcome, weights: list[float]) -> list[str]:
    if outcome.exit_code is None:
        return [f"it hangs: still running after {_DEADLINE_S} s"]
    said = "\n".join([*job.messages, *(str(e.get("message", "")) for e in job.events)])
    words = [line for line in job.messages if line.startswith("elastic: ")]
    wrong = ["a bare traceback"] if "Traceback" in "\n".join(job.messages) and not words else []
    wrong += _damaged(place.files / "checkpoints")
    if outcome.exit_code != ExitCode.OK:
        if outcome.exit_code not in _CLEAN:
            wrong.append(f"exit code {outcome.exit_code} means nothing")
        if outcome.point is None or os.strerror(outcome.point.error) not in said:
            wrong.append("what it says does not name the cause")
        return wrong
    lines = _text(place.files / "ledger.jsonl").splitlines()
    wrong += [f"ledger: {p}" for p in audit(lines, samples=SAMPLES, epochs=EPOCHS).problems]
    found = outcome.weights
    equal = len(found) == len(weights) and all(
        abs(a - b) <= _TOLERANCE for a, b in zip(found, weights, strict=True)
    )
    return wrong if equal else [*wrong, "the weights are not those of an undisturbed job"]


def _damaged(folder: Path) -> list[str]:
    directory = open_directory(str(folder))
    try:
        return [
            f"checkpoint {step}: {problem}"
            for step in catalog.list_checkpoints(directory)
            for problem in catalog.verify(directory, step)
        ]
    except ElasticError as error:
        return [f"checkpoints: {error}"]


def _counts(folder: Path) -> Counts:
    most: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*.*"):
        values = struct.unpack(f"={len(FUNCTIONS)}I", path.read_bytes())
        for function, value in zip(FUNCTIONS, values, strict=True):
            kind = (path.name.partition(".")[0], function)
            most[kind] = max(most[kind], value)
    return most


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _logs(place: Place) -> str:
    logs = sorted((place.files / "logs").rglob("*.log"))
    return "\n".join(f"--- {log.name}\n{_text(log)[-3000:]}" for log in logs)
