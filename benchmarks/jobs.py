"""Starts a training job of either side as child processes, and ends it without leftovers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scripts.step_log import Mark, StepLogReader
from tests.job_process import ROOT, descendants

SCRIPTS = ROOT / "benchmarks" / "scripts"
_POLL_S = 0.05
_NUMBERS = itertools.count()
_END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")  # also when the benchmark is killed
_TERM_S = 8.0


class Job:
    """A running job. Its workers' marks are in `directory`/marks, what it says in .../output."""

    def __init__(
        self,
        command: list[str],
        directory: Path,
        environment: dict[str, str],
        *,
        name: str = "",
        unread: bool = False,
    ) -> None:
        self.name = name
        self._log = StepLogReader(marks_directory(directory))
        self._output = directory / "output"
        self._output.touch()
        self._unread = -1
        if unread:
            self._unread, write = os.pipe()
        else:
            write = os.open(self._output, os.O_WRONLY)
        with open(write, "wb") as output:
            self._process = subprocess.Popen(
                [*_END_WITH_PARENT, *command],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def marks(self) -> list[Mark]:
        """What the workers have written so far, oldest first."""
        return self._log.marks()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def members(self) -> list[int]:
        """Pids of the newest group's workers."""
        marks = self.marks()
        newest = max(mark.generation for mark in marks)
        return sorted({mark.pid for mark in marks if mark.generation == newest})

    def wait_until(
        self, condition: Callable[[list[Mark]], bool], *, what: str, limit_s: float
    ) -> None:
        """Poll until the condition on the marks holds; RuntimeError if the job ends or hangs."""
        deadline = time.monotonic() + limit_s
        while not condition(self.marks()):
            if self._process.poll() is not None:
                raise RuntimeError(f"the job ended while waiting for {what}\n{self.story()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {limit_s} s\n{self.story()}")
            time.sleep(_POLL_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        """elastic's own JSON events of this name."""
        found = []
        for line in self._output.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [e for e in found if isinstance(e, dict) and e.get("event") == name]

    def story(self) -> str:
        """The end of what it has said."""
        return self._output.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Ask twice, then kill every process of it."""
        family = [self._process.pid, *descendants(self._process.pid)]
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.poll() is None:
                    self._process.terminate()
                self._process.wait(_TERM_S)
        for pid in family:
            _signal(pid, signal.SIGKILL)
        self._process.wait()
        if self._unread >= 0:
            os.close(self._unread)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def elastic_job(
    directory: Path,
    *arguments: str,
    workers: int,
    options: Sequence[str] = (),
    script: str = "elastic_train.py",
    unread: bool = False,
) -> Job:
    """`elastic run` of this checkout. unread: what it says goes to a pipe that nobody reads."""
    name = f"bench-{os.getpid()}-{next(_NUMBERS)}"
    command = [sys.executable, "-m", "elastic.cli", "run", "--output", "json"]
    command += ["--job", name, "--nproc-per-node", str(workers)]
    command += ["--log-dir", str(directory / "logs"), *options]
    command += [str(SCRIPTS / script), "--log-dir", str(marks_directory(directory))]
    return Job([*command, *arguments], directory, {}, name=name, unread=unread)


def torchrun_job(directory: Path, *arguments: str, workers: int) -> Job:
    """torchrun at its best on one node: with the agent's own store (see TORCH_... below)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
    command += ["--nproc-per-node", str(workers), "--max-restarts", "100"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{_free_port()}"]
    script = [str(SCRIPTS / "torchrun_train.py"), "--log-dir", str(marks_directory(directory))]
    # With the store shared between agent and workers, new workers meet addresses of dead peers.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Job([*command, *script, *arguments], directory, environment)


def ddp_job(directory: Path, *arguments: str, workers: int) -> Job:
    """Plain DDP in elastic's own process layout; it does not survive a lost worker."""
    launcher = [sys.executable, str(SCRIPTS / "ddp_launcher.py"), str(workers)]
    script = [str(SCRIPTS / "torchrun_train.py"), "--log-dir", str(marks_directory(directory))]
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as elastic's workers have it
    return Job([*launcher, *script, *arguments], directory, environment)


def marks_directory(directory: Path) -> Path:
    """Where the workers of a job write their marks."""
    path = directory / "marks"
    path.mkdir(exist_ok=True)
    return path


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
