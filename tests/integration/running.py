"""Runs tests/integration/scripts as jobs, in places that must be empty afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.job_process import DEADLINE_S, ROOT, WITHOUT_COMPILER, JobProcess, is_alive
from tests.waiting import eventually

SCRIPTS = Path(__file__).parent / "scripts"
FAILED, USAGE, CONFIGURATION = 1, 2, 78


class Place:
    """Where jobs run: their sockets, logs and files. Each of their processes has it in its
    environment, and so is found even after it has left its parent."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.sockets = Path(tempfile.mkdtemp(prefix="el-", dir="/tmp"))  # sun_path is short
        self.environment = {
            **WITHOUT_COMPILER,
            "XDG_RUNTIME_DIR": str(self.sockets),
            "OMP_NUM_THREADS": "1",
        }
        self._jobs: list[JobProcess] = []

    def start(
        self,
        script: str | Path,
        *arguments: str | Path | int,
        options: Sequence[str | Path] = (),
        nproc: int = 2,
        **environment: str,
    ) -> JobProcess:
        """Start `elastic run` of one of the scripts."""
        command = [*options, SCRIPTS / script, *map(str, arguments)]
        return self._start(command, ROOT, nproc, environment)

    def start_module(
        self,
        name: str,
        *arguments: str | Path | int,
        options: Sequence[str | Path] = (),
        nproc: int = 2,
        **environment: str,
    ) -> JobProcess:
        """Start `elastic run -m` in the folder of the place."""
        command = [*options, "-m", name, *map(str, arguments)]
        return self._start(command, self.files, nproc, environment)

    def _start(
        self, command: Sequence[str | Path], cwd: Path, nproc: int, environment: dict[str, str]
    ) -> JobProcess:
        logs, environment = self.files / "logs", {**self.environment, **environment}
        job = JobProcess(*command, nproc=nproc, log_dir=logs, environment=environment, cwd=cwd)
        self._jobs.append(job)
        return job

    def elastic(
        self, *arguments: str | Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run another `elastic` command to its end."""
        return self.python("-m", "elastic.cli", *arguments, **environment)

    def python(
        self, *arguments: str | Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python to its end, in the folder of the place."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=self.files,
            env={**os.environ, **self.environment, **environment},
        )

    def processes(self) -> set[int]:
        """Return every living process that was started here, even if its parent has changed."""
        mark = f"XDG_RUNTIME_DIR={self.sockets}".encode()
        return {
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _has_in_environment(entry, mark)
        }

    def run_directories(self) -> list[Path]:
        """Return the directories of running jobs, and those that ended jobs have not removed."""
        return list(self.sockets.glob("*/*"))

    def kill_all(self) -> None:
        """Kill all processes here, such as those that killed agents left for adoption."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def close(self) -> None:
        """End the jobs, and fail if a process or a run directory is left."""
        for job in self._jobs:
            job.close()
        try:
            eventually(lambda: not self.processes(), self._describe_processes)
            eventually(lambda: not self.run_directories(), lambda: f"{self.run_directories()}")
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.sockets)

    def _describe_processes(self) -> str:
        return f"left running: {[(pid, command_line(pid)) for pid in self.processes()]}"


def command_line(pid: int) -> str:
    """Return a process's arguments; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def steps_of(job: JobProcess) -> list[int]:
    """Return the counts of committed steps that rank 0 has printed, in order."""
    found = (re.fullmatch(r"\[.*\] step (\d+)", line) for line in list(job.output))
    return [int(match[1]) for match in found if match]


def wait_for_step(job: JobProcess, step: int) -> None:
    """Wait until rank 0 has committed this many steps."""
    job.wait_for(lambda: max(steps_of(job), default=0) >= step, f"step {step}")


def all_messages(job: JobProcess) -> str:
    """Return the job's messages and those of its events, as one text."""
    endings = [str(e.get("message", "")) for e in job.events]
    return "\n".join([*job.messages, *endings])


def tracebacks(job: JobProcess) -> str:
    return "\n".join(e["traceback"] for e in job.named("worker_failed"))


def _has_in_environment(process: Path, mark: bytes) -> bool:
    try:
        environment = (process / "environ").read_bytes()
    except OSError:
        return False
    return mark in environment.split(b"\0") and is_alive(int(process.name))


@contextlib.contextmanager
def tiny_disk(path: Path, size_kib: int) -> Iterator[Path]:
    """Mount a tmpfs of this size at `path`."""
    path.mkdir()
    options = f"size={size_kib}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
