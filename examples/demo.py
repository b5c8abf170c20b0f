"""What `make demo` runs: trains examples/digits.py with three workers and kills one of them.

    python examples/demo.py

It prints what happens, then checks what elastic promises. Exit code 0 only if every check holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rich.console import Console

HERE = Path(__file__).parent
WORKERS, EPOCHS, SAMPLES = 3, 40, 1437
KILL_AT_EPOCH = 10
LEAST_ACCURACY = 0.97
DEADLINE_S = 90.0
PROGRESS_EVERY_S = 5.0

Event = dict[str, Any]


class DemoFailed(Exception):
    """A promise of elastic did not hold."""


class Job:
    """`elastic run` as a child process: its JSON events, its workers' lines and its ledger."""

    def __init__(self, directory: Path) -> None:
        self.ledger = directory / "ledger.jsonl"
        command = [sys.executable, "-m", "elastic.cli", "run", "--output", "json"]
        command += ["--job", f"demo-{os.getpid()}", "--nproc-per-node", str(WORKERS)]
        command += ["--checkpoint-dir", str(directory / "checkpoints")]
        command += ["--ledger", str(self.ledger), "--log-dir", str(directory / "logs")]
        command += [str(HERE / "digits.py"), "--epochs", str(EPOCHS)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
        )
        self.events: list[Event] = []
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._open_streams = 2
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def hear(self, limit_s: float) -> None:
        """Read a line of output into `events` or `lines`; wait for it for `limit_s` at most."""
        with contextlib.suppress(queue.Empty):
            line = self._news.get(timeout=limit_s)
            if line is None:
                self._open_streams -= 1
            elif line.startswith("{"):
                self.events.append(json.loads(line))
            else:
                self.lines.append(line.rstrip())

    def has_ended(self) -> bool:
        """Whether the process has closed its output, and all of it has been read."""
        return self._open_streams == 0

    def newest_step(self) -> Event:
        """The record of the last committed step in the ledger; empty if there is none yet."""
        with contextlib.suppress(OSError, ValueError):
            tail = self.ledger.read_bytes()[-1000:].splitlines(keepends=True)
            records = [json.loads(line) for line in tail[1:] if line.endswith(b"\n")]
            return next((r for r in reversed(records) if "step" in r), {})
        return {}

    def close(self) -> None:
        """End the job if it still runs: a first SIGTERM lets it save, a second ends it at once."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._news.put(line)
        self._news.put(None)


class Demo:
    """The demonstration: kills a worker of the job, and prints what happens."""

    def __init__(self, job: Job, console: Console) -> None:
        self._job = job
        self._console = console
        self._status = console.status("")
        self._began = time.monotonic()
        self._said_at = 0.0

    def run(self) -> None:
        """Raises DemoFailed at the first promise that does not hold."""
        with self._status:
            self._say(f"elastic run --nproc-per-node {WORKERS} examples/digits.py")
            members = self._event("generation_formed", world_size=WORKERS)["members"]
            self._say(f"{WORKERS} workers train: {', '.join(members)}; a spare waits")
            self._until(lambda: self._job.newest_step().get("epoch", 0) >= KILL_AT_EPOCH)
            self._kill(members)
            accuracy = float(self._line(r"test accuracy ([0-9.]+)"))
            finished = self._event("job_finished")
            self._until(self._job.has_ended)
        exit_code = self._job.process.wait()
        self._say(f"finished after {finished['committed']} steps with accuracy {accuracy:.1%}")
        _require(exit_code == 0, f"exit code {exit_code}")
        _require(accuracy >= LEAST_ACCURACY, f"accuracy {accuracy} below {LEAST_ACCURACY}")
        self._audit()

    def _kill(self, members: list[str]) -> None:
        """Kill a member, and wait until the others go on and the spare has taken its place."""
        victim = members[1]
        pid = next(int(e["pid"]) for e in self._named("worker_started") if e["worker"] == victim)
        before, killed_unix_s = len(self._job.events), time.time()
        os.kill(pid, signal.SIGKILL)
        step = self._job.newest_step()
        self._say(f"[red]killed {victim}[/] (pid {pid}, SIGKILL) near step {step['step']}")
        recovered = self._event("recovered", after=before)
        self._say(
            f"[green]re-formed without it[/]: the next step, {recovered['committed']}, was "
            f"committed {recovered['total_s'] * 1000:.0f} ms after the loss"
        )
        whole = self._event("generation_formed", after=before, world_size=WORKERS)
        newcomer = ", ".join(set(whole["members"]) - set(members))
        self._say(
            f"[green]{newcomer}, the warm spare, took its place[/]: {WORKERS} workers again "
            f"{whole['time'] - killed_unix_s:.1f} s after the kill"
        )

    def _audit(self) -> None:
        command = [sys.executable, str(HERE / "ledger_check.py"), str(self._job.ledger)]
        command += ["--samples", str(SAMPLES), "--epochs", str(EPOCHS)]
        audit = subprocess.run(command, capture_output=True, text=True, check=False)
        self._say(f"ledger audit: {(audit.stdout or audit.stderr).strip()}")
        _require(audit.returncode == 0, "the ledger has problems")

    # ---- waiting

    def _event(self, name: str, *, after: int = 0, **fields: Any) -> Event:
        def matching() -> Event | None:
            found = (e for e in self._named(name, after) if fields.items() <= e.items())
            return next(found, None)

        return self._until(matching)

    def _line(self, pattern: str) -> str:
        def matching() -> str | None:
            found = (re.search(pattern, line) for line in self._job.lines)
            return next((match[1] for match in found if match), None)

        return self._until(matching)

    def _named(self, name: str, after: int = 0) -> list[Event]:
        return [e for e in self._job.events[after:] if e["event"] == name]

    def _until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition returns a true value, and return it."""
        while not (value := condition()):
            if self._job.has_ended():
                raise DemoFailed("the job ended early:\n" + "\n".join(self._job.lines[-20:]))
            if self._elapsed_s() > DEADLINE_S:
                raise DemoFailed(f"not done within {DEADLINE_S:.0f} s")
            self._job.hear(0.1)
            self._show_progress()
        return value

    # ---- output

    def _show_progress(self) -> None:
        step = self._job.newest_step()
        text = (
            f"step {step['step']}, epoch {step['epoch'] + 1} of {EPOCHS}, "
            f"{step['world_size']} workers"
            if step
            else "starting"
        )
        self._status.update(text)
        if not self._console.is_terminal and self._elapsed_s() - self._said_at > PROGRESS_EVERY_S:
            self._say(text)

    def _say(self, text: str) -> None:
        self._said_at = self._elapsed_s()
        self._console.print(f"[dim]{self._said_at:5.1f} s[/]  {text}")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoFailed(otherwise)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="elastic-demo-") as directory:
        job = Job(Path(directory))
        try:
            Demo(job, console).run()
        except DemoFailed as failure:
            console.print(f"[bold red]the demonstration failed:[/] {failure}")
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            job.close()
    console.print("[bold green]the demonstration succeeded[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
