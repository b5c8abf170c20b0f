"""Runs a style undisturbed as a world of one, which is the truth, and as a job under kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.styles.catalogue import STEPS_PER_EPOCH, Style
from tests.chaos.styles.killer import Kill, Killer
from tests.job_process import ROOT, WITH_COMPILER, JobProcess

WORKER = Path(__file__).parent / "worker.py"
NPROC = 3
PACE_S = 0.02
_ENVIRONMENT = {**WITH_COMPILER, "OMP_NUM_THREADS": "1"}

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The outcome of a run, for the checks."""

    style: Style
    out: Path
    exit_code: int | None
    """None if the job was still running after its deadline."""
    took_s: float
    epochs: int
    seed: int = 0
    events: list[Event] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    complete: bool = True
    """All kills were done, and a full group has trained after the last one."""

    @property
    def ledger(self) -> Path:
        return self.out / "ledger.jsonl"

    def named(self, name: str) -> list[Event]:
        return [e for e in self.events if e["event"] == name]


def epochs_for(kills: int) -> int:
    """Enough epochs for this number of kills and for what follows each of them."""
    return 12 + 5 * max(kills - 2, 0)


def undisturbed(styles: Iterable[Style], out: Path, epochs: dict[str, int]) -> dict[str, Run]:
    """Run each style as a world of one. epochs: of each style, by name."""
    arguments: list[str] = []
    folders = {}
    for style in styles:
        folders[style.name] = folder = out / style.name / "one"
        folder.mkdir(parents=True)
        arguments += [style.name, str(epochs[style.name]), str(folder)]
    began = time.monotonic()
    module = "tests.chaos.styles.reference"
    environment = {**os.environ, **_ENVIRONMENT}
    if arguments:
        subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, check=False
        )
    took_s = time.monotonic() - began
    return {
        style.name: Run(
            style=style,
            out=folders[style.name],
            exit_code=int((folders[style.name] / "exit_code").read_text()),
            took_s=took_s,
            epochs=epochs[style.name],
        )
        for style in styles
    }


def as_job(
    style: Style, out: Path, *, kills: int, seed: int, epochs: int, options: Sequence[str] = ()
) -> Run:
    """Run a style with three workers and a spare, and kill `kills` workers.

    options: those of the workers' script, such as --large.
    """
    out = out / style.name / f"job-{kills}-kills"
    out.mkdir(parents=True)
    pace = ["--pace-s", str(PACE_S), "--steps", str(epochs * STEPS_PER_EPOCH)]
    arguments = [style.name, str(out), "--epochs", str(epochs), *(pace if kills else [])]
    arguments += options
    started = time.monotonic()
    deadline = 60.0 + 15.0 * kills
    with JobProcess(
        *("--launch", "elastic", "--console", "none", "--ledger", out / "ledger.jsonl"),
        *(WORKER, *arguments),
        nproc=NPROC,
        log_dir=out / "logs",
        environment=_ENVIRONMENT,
    ) as job:
        # Workers are forked once torch is imported, which takes long if all tests do so at once.
        job.wait_for(
            lambda: job.named("generation_formed") or job.process.poll() is not None, "group"
        )
        began = time.monotonic()
        seed_of_kills = zlib.crc32(f"{style.name} {seed}".encode())
        killer = Killer(job, out, seed_of_kills, NPROC, style.calm_until)
        complete = killer.run(kills, deadline) if kills else True
        try:
            code: int | None = job.process.wait(max(15.0, deadline - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            code = None
    return Run(
        style=style,
        out=out,
        exit_code=code,
        took_s=time.monotonic() - started,
        epochs=epochs,
        seed=seed,
        events=job.events,
        messages=job.messages,
        kills=killer.kills,
        complete=complete,
    )


def story(run: Run) -> str:
    again = f"--style {run.style.name} --kills {len(run.kills)} --seed {run.seed}"
    lines = [f"again: python -m tests.chaos.styles {again}", f"left in {run.out}"]
    lines += [
        f"killed {k.worker} ({k.aim}) when step {k.step} was the newest, at {k.at:.3f}"
        for k in run.kills
    ]
    lines += [json.dumps(e) for e in run.events if e["event"] != "progress"]
    lines += run.messages
    for log in sorted([*run.out.glob("logs/**/*.log"), *run.out.glob("output.log")]):
        tail = log.read_text(errors="replace").splitlines()[-25:]
        lines += [f"---- {log.relative_to(run.out)}", *tail] if tail else []
    return "\n".join(lines)


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="styles-"))
