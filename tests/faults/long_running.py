"""Jobs that train on while one call after another fails in them.

So a point costs the start of a worker, and not of a whole job. Each point also kills a worker, so
that every role has work and the job must show that it can still form a group. If the failing call
ends a second of the three workers, one with the state remains.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import random
import re
import shutil
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic.errors import ExitCode
from examples.ledger_check import audit
from tests.etcd_cluster import free_ports
from tests.faults.armed import ArmedPoint, Fired
from tests.faults.judging import (
    bare_tracebacks,
    damaged_checkpoints,
    left_behind,
    logs_below,
    names_cause,
    said_by,
    text_of,
    wrong_words,
)
from tests.faults.points import Counts, Point
from tests.faults.reference import SAMPLES, Reference
from tests.faults.running import UNDER, counts_in
from tests.integration.running import Place
from tests.job_process import ROOT, CommandProcess, Event, JobProcess, is_alive
from tests.waiting import eventually

SCRIPT = Path(__file__).parent / "long_job.py"
WORLD = 3
_STEPS_ON = 8  # steps that all members of a full group take before the job counts as going on
_DEADLINE_S = 90.0
_MOST_ENDS = 3
_END_S = 40.0
_TOLD_WITHIN_S = 8.0
_NOTICED_WITHIN_S = 25.0  # two looks of the coordinator at its own port, each 5 s after the other
_POLL_S = 0.01
_ROW = struct.Struct("=qqd")
_TOLERANCE = 1e-9
_COMMON = ("--checkpoint-every", "10", "--silence-timeout-s", "20", "--start-timeout-s", "60")


@dataclass(kw_only=True)
class LongOutcome:
    """What one point has done to a job."""

    point: Point | None
    fired: Fired | None = None
    ends: int = 0
    """How often a process has ended and was replaced."""
    ends_job: bool = False
    """This is the outcome of stopping the job after its last point, not of a point."""
    ended: str = ""
    """What has ended and how, in words; empty if the job goes on."""
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    story: str = ""

    @property
    def again_and_again(self) -> bool:
        """Starting the process again does not help."""
        return self.ends > _MOST_ENDS

    @property
    def line(self) -> str:
        verdict = "FAIL" if self.wrong else "ok  " if self.fired is not None else "miss"
        about = self.fired.about if self.fired is not None else ""
        ended = self.ended or "goes on"
        return f"{verdict} {self.point!s:36} {ended:18} {self.took_s:5.1f} s  {about}"


def _is_of_torch(failed: Event, fired: Fired) -> bool:
    """Whether torch had the failing call and hides the error: its threads for gloo and the store
    let the group hang, or C++ ends the process where no exception may pass."""
    aborted = "SIGABRT" in failed["message"] and re.search("libtorch|libstdc", fired.about)
    return failed["kind"] == "left_out" or bool(aborted)


class Over(Exception):
    """The job has ended; the argument is its last outcome."""


class LongJob(abc.ABC):
    """What both kinds of job have in common."""

    leaves_no_directory = True

    def __init__(self, library: Path, place: Place, reference: Reference, seed: int) -> None:
        self.place, self._reference = place, reference
        self._source = random.Random(seed)
        calls = place.files / "calls"
        calls.mkdir()
        self.armed = ArmedPoint(calls)
        # Not below UNDER: writes to the test's own files must not fail.
        self._own = Path(str(place.files).replace("/el-", "/of-el-", 1))
        self._own.mkdir()
        self._progress = (self._own / "progress").open("w+b", buffering=0)
        self._progress.write(bytes(_ROW.size * WORLD))
        self.environment = {
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(library),
            "FAULTS_FOLDER": str(calls),
            "FAULTS_UNDER": UNDER,
        }
        self.script = (SCRIPT, self._own / "progress")
        self.killed: set[str] = set()
        self._failed_in: dict[int, set[int]] = {}  # by process, the errors of its failing calls

    # ---- what differs between the two kinds

    @abc.abstractmethod
    def processes(self) -> dict[str, CommandProcess]:
        """The processes of elastic that were started here and should live, by name."""

    @abc.abstractmethod
    def worker_events(self, name: str) -> list[Event]:
        """All events of this name that the job has written about its workers."""

    @abc.abstractmethod
    def members(self) -> list[str]:
        """The members of the newest group."""

    @abc.abstractmethod
    def begin(self, point: Point) -> list[str]:
        """Arm the point, in a new process if it counts from a start, and kill a worker."""

    @abc.abstractmethod
    def replace(self, name: str, process: CommandProcess) -> bool:
        """Replace a process that has ended; False if the job has ended with it."""

    @abc.abstractmethod
    def stop(self) -> list[str]:
        """Stop the job as an operator does; what is wrong with its end."""

    def _victim(self, prefix: str = "") -> str:
        """A random member whose name begins with `prefix`. Waits if there is no group now."""

        def found() -> list[str]:
            return [m for m in self.members() if m.startswith(prefix)]

        choice = eventually(found, "nobody trains", _DEADLINE_S, every_s=_POLL_S)
        return self._source.choice(choice)

    # ---- one point

    def settle(self, point: Point | None = None) -> LongOutcome:
        """Wait until all train after the job's start. point: one that was armed before it."""
        return self._see_through(LongOutcome(point=point), 0)

    def attempt(self, point: Point) -> LongOutcome:
        """Try a point in the running job. Raises Over with the outcome if the job ends or hangs."""
        outcome = LongOutcome(point=point)
        outcome.wrong += self.begin(point)
        return self._see_through(outcome, self._newest())

    def _see_through(self, outcome: LongOutcome, after: int) -> LongOutcome:
        began = time.monotonic()
        failed_before = len(self.worker_events("worker_failed"))
        story_before = {name: len(p.events) for name, p in self.processes().items()}
        marked = False
        ends_at = began + _DEADLINE_S
        while not (self._all_train_after(after) and (marked or self.armed.fired is None)):
            if self.armed.fired is not None and not marked:
                marked, after = True, max(after, self._newest())
            gone = {n: p for n, p in self.processes().items() if p.process.poll() is not None}
            over = False
            for name, process in gone.items():
                outcome.wrong += self._wrong_end_of(process)
                outcome.ended = f"{name} ends {process.process.returncode}"
                over = over or outcome.again_and_again or not self.replace(name, process)
                outcome.ends += 1
            if over:
                self._note(outcome, began, story_before)
                outcome.wrong += self._wrong_rest(stopped=False)
                raise Over(outcome)
            if time.monotonic() > ends_at:
                outcome.wrong.append(f"it hangs: not all train {_DEADLINE_S:.0f} s later")
                self._note(outcome, began, story_before)
                raise Over(outcome)
            time.sleep(_POLL_S)
        self.armed.disarm()
        outcome.fired = self.armed.fired
        outcome.wrong += self._wrong_workers(outcome, failed_before)
        outcome.wrong += self._wrong_weights()
        for process in self.processes().values():
            outcome.wrong += bare_tracebacks(process)
        self._note(outcome, began, story_before)
        return outcome

    def _note(self, outcome: LongOutcome, began: float, before: dict[str, int]) -> None:
        outcome.fired = self.armed.fired
        outcome.took_s = time.monotonic() - began
        if outcome.wrong:
            outcome.story = self.story(before)

    def story(self, events_from: Mapping[str, int] | None = None) -> str:
        """What all processes have said. events_from: the first event of each to tell."""
        told = [
            f"--- {name}, exit {p.process.poll()}\n"
            + "\n".join(map(str, p.events[(events_from or {}).get(name, 0) :]))
            + f"\n{p.messages}\n{p.output[-10:]}"
            for name, p in self.processes().items()
        ]
        return "\n".join([*told, logs_below([self.place.files / "logs", self.place.sockets])])

    # ---- judging

    def _wrong_end_of(self, process: CommandProcess) -> list[str]:
        process.wait()
        self._remember(self.armed.fired)
        errors = set(self._failed_in.get(process.process.pid, ()))  # it may end as late as now
        errors |= {self.armed.fired.error} if self.armed.fired is not None else set()
        wrong = wrong_words(process.process.returncode, said_by(process), errors)
        return wrong + bare_tracebacks(process)

    def _wrong_workers(self, outcome: LongOutcome, before: int) -> list[str]:
        """A worker that its failing call ends must say so, and no other worker may fail."""
        fired = outcome.fired
        self._remember(fired)
        victim = self._worker_of(fired.pid) if fired is not None else None
        if victim is not None and fired is not None and not is_alive(fired.pid):
            outcome.ended = "the worker ends"
        failed = self.worker_events("worker_failed")[before:]
        wrong = []
        if fired is not None and outcome.ended == "the worker ends" and victim not in self.killed:
            ends_at = time.monotonic() + _TOLD_WITHIN_S
            while not any(e["worker"] == victim for e in failed) and time.monotonic() < ends_at:
                time.sleep(_POLL_S)
                failed = self.worker_events("worker_failed")[before:]
            told = [e for e in failed if e["worker"] == victim]
            text = "\n".join([*map(str, told), *(text_of(Path(e["log"])) for e in told)])
            if not told or not (names_cause(text, fired.error) or _is_of_torch(told[0], fired)):
                wrong.append(f"what {victim} says does not name the cause: {text[-1500:]}")
        if not outcome.ended:
            # gloo may leave a worker waiting for a peer that gave up; the state is not lost.
            others = {e["worker"] for e in failed if e["kind"] != "left_out"} - self.killed
            # A worker whose call failed may end as late as the next point, when all others train.
            others -= {self._worker_of(pid) for pid in self._failed_in}
            wrong += [f"workers fail that had no failing call: {others}"] if others else []
        return wrong

    def _remember(self, fired: Fired | None) -> None:
        if fired is not None:
            self._failed_in.setdefault(fired.pid, set()).add(fired.error)

    def _worker_of(self, pid: int) -> str | None:
        started = [e for e in self.worker_events("worker_started") if e["pid"] == pid]
        return str(started[-1]["worker"]) if started else None

    def _wrong_weights(self) -> list[str]:
        wrong = []
        for rank, (steps, _, found) in enumerate(self._rows()):
            right = self._reference.after(steps)
            if abs(found - right) > _TOLERANCE:
                wrong.append(f"rank {rank} after {steps} steps has {found}, not {right}")
        return wrong

    def _wrong_rest(self, *, stopped: bool) -> list[str]:
        """What is wrong with what the job has left and written, once all have ended."""
        wrong = left_behind(self.place, directories=self.leaves_no_directory)
        wrong += damaged_checkpoints(self.place.files / "checkpoints")
        lines = text_of(self.place.files / "ledger.jsonl").splitlines()
        if stopped or lines:
            told = audit(lines, samples=SAMPLES)
            wrong += [f"ledger: {p}" for p in told.problems if stopped or p != "there are no steps"]
            if stopped and told.resumed:
                wrong.append(f"{told.resumed} times steps were lost")
            if stopped and told.steps < self._newest():
                wrong.append(f"the ledger has {told.steps} steps of {self._newest()}")
        return wrong

    # ---- progress

    def _rows(self) -> list[tuple[int, int, float]]:
        size = _ROW.size * WORLD
        while True:  # a row may be half written
            first = os.pread(self._progress.fileno(), size, 0)
            if first == os.pread(self._progress.fileno(), size, 0):
                return list(_ROW.iter_unpack(first))

    def _newest(self) -> int:
        return max(steps for steps, _, _ in self._rows())

    def _all_train_after(self, steps: int) -> bool:
        return all(n >= steps + _STEPS_ON and world == WORLD for n, world, _ in self._rows())

    # ---- workers

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL. The point is not blamed for its end."""
        self.killed.add(worker)
        pids = [e["pid"] for e in self.worker_events("worker_started") if e["worker"] == worker]
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids[-1]), signal.SIGKILL)

    def counts(self) -> Counts:
        """For each role and function, the most calls that a process has made so far."""
        return counts_in(self.place.files / "calls")

    def close(self) -> None:
        for process in self.processes().values():
            process.close()
        self._progress.close()
        shutil.rmtree(self._own)


class MachineJob(LongJob):
    """A job of `elastic run`."""

    def __init__(
        self, library: Path, place: Place, reference: Reference, seed: int, point: Point | None
    ) -> None:
        super().__init__(library, place, reference, seed)
        if point is not None:
            self.armed.arm(point)
        files = place.files
        options = [*_COMMON, "--hang-timeout-s", "20", "--checkpoint-dir", files / "checkpoints"]
        options += ["--ledger", files / "ledger.jsonl", "--stop-grace-s", "10"]
        options += ["--max-restarts", "100000", "--spares", str(seed % 2)]
        self._job: JobProcess = place.start(
            *self.script, options=options, nproc=WORLD, **self.environment
        )

    def processes(self) -> dict[str, CommandProcess]:
        return {"run": self._job}

    def worker_events(self, name: str) -> list[Event]:
        return self._job.named(name)

    def members(self) -> list[str]:
        return self._job.members()

    def begin(self, point: Point) -> list[str]:
        self.armed.arm(point, self._pid(point.role) if point.since_kill else 0)
        self.kill(self._victim())
        return []

    def _pid(self, role: str) -> int:
        found = [p.name for p in (self.place.files / "calls").glob(f"{role}.*")]
        return next(pid for pid in (int(n.partition(".")[2]) for n in found) if is_alive(pid))

    def replace(self, name: str, process: CommandProcess) -> bool:
        del name, process
        return False

    def stop(self) -> list[str]:
        self._job.process.terminate()
        try:
            code = self._job.wait(_END_S)
        except AssertionError as error:
            return [f"it does not stop: {error}"]
        wrong = [] if code == ExitCode.TERMINATED else [f"stopped, it ends with {code}"]
        return wrong + bare_tracebacks(self._job) + self._wrong_rest(stopped=True)


class ClusterJob(LongJob):
    """A coordinator and two nodes, with two workers and one. No worker's call fails here."""

    leaves_no_directory = False  # a node's next agent uses its directory
    SLOTS = {"a": 2, "b": 1}  # noqa: RUF012

    def __init__(
        self, library: Path, place: Place, reference: Reference, seed: int, etcd: str
    ) -> None:
        super().__init__(library, place, reference, seed)
        (self.port,) = free_ports(1)  # of the coordinator
        self._environment = {
            **place.environment,
            **self.environment,
            "ELASTIC_ETCD": etcd,
            "ELASTIC_JOB": place.files.name.replace("_", "-") + "-job",
        }
        self._past: list[CommandProcess] = []
        self._now: dict[str, CommandProcess] = {"coordinator": self._start_coordinator()}
        for node in self.SLOTS:
            self._now[node] = self._start_agent(node)

    def processes(self) -> dict[str, CommandProcess]:
        return dict(self._now)

    def worker_events(self, name: str) -> list[Event]:
        events = [e for p in (*self._past, *self._now.values()) for e in p.named(name)]
        return sorted(events, key=lambda e: float(e["time"]))

    def members(self) -> list[str]:
        formed = self.worker_events("generation_formed")
        return list(max(formed, key=lambda e: int(e["generation"]))["members"])

    def begin(self, point: Point) -> list[str]:
        name = "coordinator" if point.role == "coordinator" else "a"
        process = self._now[name]
        wrong = []
        if point.since_kill:
            self.armed.arm(point, process.process.pid)
        else:
            # With SIGTERM the coordinator makes way, so nobody waits for its lease to end.
            process.process.send_signal(signal.SIGTERM if name == "coordinator" else signal.SIGKILL)
            process.wait(_END_S)
            wrong += bare_tracebacks(process)
            self.armed.arm(point)
            self.replace(name, process)
        # A worker of the agent that may end with all of its workers: another node has the state.
        self.kill(self._victim("a-"))
        return wrong

    def replace(self, name: str, process: CommandProcess) -> bool:
        self._past.append(process)
        starts = self._start_coordinator if name == "coordinator" else None
        self._now[name] = starts() if starts is not None else self._start_agent(name)
        return True

    def stop(self) -> list[str]:
        wrong = self._wrong_end_of_unreachable()
        stopped = self._elastic("stop")
        try:
            stopped.wait(_END_S)
            for name, process in self._now.items():
                code = process.wait(_END_S)
                if name != "coordinator" and code != ExitCode.STOPPED:
                    wrong.append(f"stopped, {name} ends with {code}")
                wrong += bare_tracebacks(process)
        except AssertionError as error:
            wrong.append(f"it does not stop: {error}")
        stopped.close()
        return wrong + self._wrong_rest(stopped=True)

    def _wrong_end_of_unreachable(self) -> list[str]:
        """Replace a coordinator that accepts no more connections, once it has noticed and ended:
        nobody could ask it to stop. What is wrong with its end."""
        coordinator = self._now["coordinator"]
        if errno.ENFILE not in self._failed_in.get(coordinator.process.pid, ()):
            return []
        try:
            coordinator.wait(_NOTICED_WITHIN_S)
        except AssertionError:
            return []  # ENFILE elsewhere closes no acceptor
        wrong = self._wrong_end_of(coordinator)
        self.replace("coordinator", coordinator)
        try:
            return wrong + self.settle().wrong
        except Over as over:
            return wrong + over.args[0].wrong

    def close(self) -> None:
        for process in self._past:
            process.close()
        super().close()

    def _start_coordinator(self) -> CommandProcess:
        files, address = self.place.files, f"127.0.0.1:{self.port}"
        return self._elastic(
            *("coordinator", "--listen", address, "--advertise", address),
            *("--events-file", "/dev/stderr", "--leader-ttl-s", "2", "--quarantine-after", "0"),
            *("--ledger", files / "ledger.jsonl", "--checkpoint-dir", files / "checkpoints"),
            *("--max-restarts", "100000", "--hang-timeout-s", "20", "--stop-grace-s", "10"),
        )

    def _start_agent(self, node: str) -> CommandProcess:
        files, slots = self.place.files, str(self.SLOTS[node])
        return self._elastic(
            *("agent", "--node-name", node, "--node-host", "127.0.0.1", "--node-ttl-s", "2"),
            *("--machine", f"machine-of-{node}"),
            *("--nproc-per-node", slots, "--spares", "0", "--record-samples", *_COMMON),
            *("--checkpoint-dir", files / "checkpoints", "--log-dir", files / "logs"),
            *self.script,
        )

    def _elastic(self, *arguments: str | Path) -> CommandProcess:
        command = [sys.executable, "-m", "elastic.cli", *map(str, arguments)]
        return CommandProcess(command, environment=self._environment)
