"""Stands between the agent and a script that was written for torchrun, in the script's place.

This process has the link to the agent, and the store at which the script's group meets if it gets
rank 0; the script runs in a child. So the script finds itself as alone in its process as torchrun
would leave it, its end is what the kernel says it is, and the store outlives it, as the others may
still need it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic.core.membership import Failure, FailureKind, Generation
from elastic.core.worker.machine import Effect, ReportStatus, Worker
from elastic.errors import ExitCode
from elastic.rpc.codec import failure_to_pb, generation_from_pb, status_to_pb
from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.process_title import set_worker_title
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb
from elastic.worker.group.process_group import StoreHost, first_line
from elastic.worker.link import Link
from elastic.worker.process.children import die_with_parent
from elastic.worker.process.torchrun_environment import torchrun_environment
from elastic.worker.process.torchrun_script import ClassicScript, failure_of, run_when_told

_SIGN_OF_LIFE_S = 0.6  # well below the agent's patience with a silent process
_LOOPBACK = "127.0.0.1"


def run_classic(request: pb.SpawnRequest) -> int:
    """Attend a script from here to its end; return the exit code. Returns in two processes."""
    read, write = os.pipe()
    this = os.getpid()
    child = os.fork()  # now: it shall inherit no thread and no socket
    if child == 0:
        os.close(write)
        die_with_parent(this)
        return run_when_told(read, list(request.argv), module=request.module)
    os.close(read)
    script = ClassicScript(child, write)
    for number in STRAY_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    error_file = Path(request.log_path).with_suffix(".error.json")
    link = Link(request.worker, request.socket_path)
    return _Attendant(link, script, request.argv[0], error_file).run()


class _Attendant:
    """The link's thread hears the agent, the main thread waits for the script."""

    def __init__(self, link: Link, script: ClassicScript, name: str, error_file: Path) -> None:
        self._link = link
        self._name = name
        self._script = script
        self._error_file = error_file
        self._machine = Worker(link.worker, pid=os.getpid())
        self._lock = threading.Lock()
        self._host: StoreHost | None = None
        self._job = ""
        self._done = False
        self._dismissed = threading.Event()

    def run(self) -> int:
        """The exit code: the script's end as the agent is to understand it."""
        self._link.hello()
        with self._lock:
            self._report(self._machine.attached())
        self._link.start(self._command, self._report_again, self._give_up)
        threading.Thread(target=self._beat, name="elastic-pulse", daemon=True).start()
        status = self._script.wait()
        if status != 0 or not self._note_finished():
            failure = failure_of(self._link.worker, status, self._error_file)
            self._link.send(failure=failure_to_pb(failure))
            return ExitCode.SCRIPT_FAILED
        self._dismissed.wait()
        return ExitCode.OK

    def _note_finished(self) -> bool:
        """False if the script has never begun."""
        with self._lock:
            self._done = True
            if self._machine.status.generation == 0:
                return False
            self._report(self._machine.finished(0))
        return True

    # ---- on the link's thread

    def _command(self, command: pb.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        try:
            if kind == "assignment":
                self._take_up(command.assignment)
            elif kind == "generation":
                self._announced(generation_from_pb(command.generation))
            elif kind == "terminate":
                self._terminate()
            elif kind == "dismiss":
                self._dismissed.set()
            elif kind == "report_again":
                self._report_again()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)

    def _take_up(self, assignment: pb.Assignment) -> None:
        if self._host is not None:  # told again: it reported as a spare just before the first time
            return
        self._job = assignment.job
        with self._lock:
            self._report(self._machine.assigned(assignment.slot))
            ports = (assignment.first_port, assignment.last_port)
            self._host = StoreHost(assignment.host or _LOOPBACK, ports)
            self._report(self._machine.prepared(self._host.endpoint))

    def _announced(self, generation: Generation) -> None:
        with self._lock:
            self._report(self._machine.generation_announced(generation))
            if self._machine.joinable() is None:
                return
            self._report(self._machine.join_began(generation))
            environment = torchrun_environment(
                generation, self._link.worker, job=self._job, error_file=str(self._error_file)
            )
            self._script.begin(environment)
            self._report(self._machine.joined(generation, 0))
        rank = generation.rank_of(self._link.worker)
        set_worker_title(self._link.worker, self._name, rank)
        if rank == 0:  # the recovery, if it is one, ends here
            reformed = job_pb2.Reformed(worker=self._link.worker, generation=generation.number)
            self._link.send(reformed=reformed)

    def _terminate(self) -> None:
        """The script is asked to end; if it has, there is nothing to wait for."""
        with self._lock:
            if self._done:
                self._dismissed.set()
            else:
                self._script.terminate()

    def _give_up(self, error: Exception) -> None:
        """Nothing can come of this worker; the kernel ends the script with it."""
        message = f"{type(error).__name__}: {first_line(error)}"
        failure = Failure(
            worker=self._link.worker,
            kind=FailureKind.EXCEPTION,
            code=int(ExitCode.SCRIPT_FAILED),
            signature=message,
            message=message,
        )
        self._link.send(failure=failure_to_pb(failure))
        os._exit(ExitCode.SCRIPT_FAILED)

    # ---- reports

    def _report_again(self) -> None:
        with self._lock:
            self._link.send(status=status_to_pb(self._machine.status))

    def _report(self, effects: Sequence[Effect]) -> None:
        """Nobody aborts a classic script's group but by ending its members."""
        for effect in effects:
            if isinstance(effect, ReportStatus):
                self._link.send(status=status_to_pb(effect.status))

    def _beat(self) -> None:
        while not self._dismissed.wait(_SIGN_OF_LIFE_S):
            self._link.hello()
