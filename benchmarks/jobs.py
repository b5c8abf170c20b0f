"""Starts a training job of any side as child processes, and leaves none of them behind."""

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
_END_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")  # even if the benchmark is killed
_TERM_S = 8.0


class Job:
    """A running job. `directory`/marks has its workers' marks, `directory`/output its output.

    unread: the output goes to a pipe that nobody reads instead."""

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
        """Return all marks that the workers have written so far, oldest first."""
        return self._log.marks()

    @property
    def pid(self) -> int:
        return self._process.pid

    def members(self) -> list[int]:
        """Return the pids of the newest group's workers."""
        marks = self.marks()
        newest = max(mark.generation for mark in marks)
        return sorted({mark.pid for mark in marks if mark.generation == newest})

    def wait_until(
        self, condition: Callable[[list[Mark]], bool], *, what: str, limit_s: float
    ) -> None:
        """Wait until `condition` holds for the marks; RuntimeError if the job ends or hangs."""
        deadline = time.monotonic() + limit_s
        while not condition(self.marks()):
            if self._process.poll() is not None:
                raise RuntimeError(f"the job ended while waiting for {what}\n{self.story()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {limit_s} s\n{self.story()}")
            time.sleep(_POLL_S)

    def wait_for_end(self, limit_s: float) -> None:
        """Wait until the job has ended well; RuntimeError otherwise."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end within {limit_s} s\n{self.story()}") from None
        if code != 0:
            raise RuntimeError(f"the job ended with exit code {code}\n{self.story()}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return elastic's JSON events of this name."""
        found = []
        for line in self._output.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [e for e in found if isinstance(e, dict) and e.get("event") == name]

    def story(self) -> str:
        """Return the end of the output, for an error message."""
        return self._output.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Send SIGTERM up to twice, then kill all processes of the job that are left."""
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
    """Start `elastic run` of this checkout. unread: see `Job`."""
    name = f"bench-{os.getpid()}-{next(_NUMBERS)}"
    command = [sys.executable, "-m", "elastic.cli", "run", "--output", "json"]
    command += ["--job", name, "--nproc-per-node", str(workers)]
    command += ["--log-dir", str(directory / "logs"), *options]
    command += [str(SCRIPTS / script), "--log-dir", str(marks_directory(directory))]
    return Job([*command, *arguments], directory, {}, name=name, unread=unread)


def torchrun_job(directory: Path, *arguments: str, workers: int) -> Job:
    """Start torchrun at its best on one node: the agent has a store of its own (see below)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
    command += ["--nproc-per-node", str(workers), "--max-restarts", "100"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{_free_port()}"]
    script = [str(SCRIPTS / "torchrun_train.py"), "--log-dir", str(marks_directory(directory))]
    # If agent and workers share a store, new workers find the addresses of dead peers in it.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Job([*command, *script, *arguments], directory, environment)


def ddp_job(directory: Path, *arguments: str, workers: int) -> Job:
    """Start plain DDP in elastic's own process layout; it does not survive a lost worker."""
    launcher = [sys.executable, str(SCRIPTS / "ddp_launcher.py"), str(workers)]
    script = [str(SCRIPTS / "torchrun_train.py"), "--log-dir", str(marks_directory(directory))]
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as in elastic's workers
    return Job([*launcher, *script, *arguments], directory, environment)


def marks_directory(directory: Path) -> Path:
    """Return the directory for the marks of a job's workers; make it if necessary."""
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
