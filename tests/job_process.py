"""Runs a real `elastic` command as a child process: its events, its workers, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from elastic.runtime.orphans import children

ROOT = Path(__file__).parent.parent
WITH_COMPILER = {"PYTHONPATH": str(ROOT)}
WITHOUT_COMPILER = {"PYTHONPATH": f"{ROOT / 'tests/no_compiler'}:{ROOT}"}
"""For processes that call no torch.compile: they start in 60% of the time."""
DEADLINE_S = 90.0

Event = dict[str, Any]
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Begins the commands that tests start, so that none outlives tests that are killed."""
Process = TypeVar("Process", bound="CommandProcess")


class CommandProcess:
    """Any command. Collects its output as it comes; JSON objects on stderr are its events."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.process = subprocess.Popen(
            [*DIE_WITH_PARENT, *command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **WITHOUT_COMPILER,
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
            start_new_session=True,
        )
        self.events: list[Event] = []
        self.messages: list[str] = []
        self.output: list[str] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    # ---- waiting for conditions

    def wait_for(
        self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S
    ) -> Any:
        """The condition's first true value. Fails with the whole story after the deadline, or if
        the command ends before."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or self._gone(), deadline_s):
                raise AssertionError(f"no {what} within {deadline_s} s\n{self.story()}")
            value = condition()
        if not value:
            raise AssertionError(f"it ended before: {what}\n{self.story()}")
        return value

    def wait_for_event(self, name: str, *, after: int = 0, **fields: Any) -> Event:
        """The first event of this name and with these fields, from index `after` on."""

        def found() -> Event | None:
            return next(
                (
                    e
                    for e in self.events[after:]
                    if e["event"] == name and all(e.get(k) == v for k, v in fields.items())
                ),
                None,
            )

        event: Event = self.wait_for(found, f"event {name} {fields}")
        return event

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end; returns the exit code. All output has been read by then."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s\n{self.story()}") from None
        for reader in self._readers:
            reader.join(5)
        return code

    # ---- what is known

    def named(self, name: str) -> list[Event]:
        return [e for e in self.events if e["event"] == name]

    def story(self) -> str:
        events = "\n".join(json.dumps({**e, "traceback": "..."}) for e in self.events)
        return f"events:\n{events}\nmessages: {self.messages}\noutput: {self.output[-30:]}"

    # ---- the end

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self: Process) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- reading

    def _gone(self) -> bool:
        return self.process.poll() is not None and not any(r.is_alive() for r in self._readers)

    def _read_events(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                event = _parsed(line)
                if event is None:
                    self.messages.append(line.rstrip("\n"))
                else:
                    self.events.append(event)
                self._changed.notify_all()
        self._notify_end()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.output.append(line.rstrip("\n"))
                self._changed.notify_all()
        self._notify_end()

    def _notify_end(self) -> None:
        self.process.wait()
        time.sleep(0)  # let the other reader finish its last line
        with self._changed:
            self._changed.notify_all()


class JobProcess(CommandProcess):
    """`elastic run`, with its workers."""

    def __init__(
        self,
        *arguments: str | Path,
        nproc: int = 3,
        log_dir: Path,
        environment: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        command = [sys.executable, "-m", "elastic.cli", "run", "--output", "json"]
        command += ["--nproc-per-node", str(nproc), "--log-dir", str(log_dir)]
        super().__init__([*command, *map(str, arguments)], environment=environment, cwd=cwd)

    def members(self) -> list[str]:
        """The workers of the newest generation, by rank."""
        formed = self.named("generation_formed")
        return list(formed[-1]["members"]) if formed else []

    def pid_of(self, worker: str) -> int:
        return next(int(e["pid"]) for e in self.named("worker_started") if e["worker"] == worker)

    def kill_worker(self, worker: str, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid_of(worker), number)


def _parsed(line: str) -> Event | None:
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and "event" in event:
            return event
    return None


def descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in children(pid):
            yield child
            yield from descendants(child)


def is_alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
