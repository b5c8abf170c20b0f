"""Stands between the agent and a script that was written for torchrun, in the script's place.

This process has the link to the agent, and the store at which the script's group meets if it gets
rank 0; the script runs in a child. So the script finds itself as alone in its process as torchrun
would leave it, its end is what the kernel says it is, and the store outlives it, as the others may
still need it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.core.membership import Failure, FailureKind, Generation, WorkerId, signal_name
from elastic.core.worker.machine import Effect, ReportStatus, Worker
from elastic.errors import ElasticError, ExitCode
from elastic.rpc.codec import failure_to_pb, generation_from_pb, status_to_pb
from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.process_title import set_worker_title
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb
from elastic.worker import session as sessions
from elastic.worker.group.process_group import StoreHost, first_line
from elastic.worker.link import Link
from elastic.worker.process.as_python import exit_code_of, in_words, run_program, tell_uncaught
from elastic.worker.process.children import die_with_parent

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


# Names and values as in torch.distributed.elastic.agent.server.local_elastic_agent (torch 2.13).
_ROLE = "default"


def torchrun_environment(
    generation: Generation, worker: WorkerId, *, job: str, error_file: str
) -> dict[str, str]:
    """The variables for a member of the generation.

    Ranks follow each other on a node, and so do local ranks, also where it has fewer members than
    slots: a script takes them for indices. error_file: where torch's `record` leaves exceptions.
    """
    nodes = list(dict.fromkeys(m.node for m in generation.members))
    rank = generation.rank_of(worker)
    if rank is None:
        raise ValueError(f"{worker} is no member of generation {generation.number}")
    node = generation.members[rank].node
    neighbours = [m.worker for m in generation.members if m.node == node]
    host, _, port = generation.store_endpoint.rpartition(":")
    world_size = str(generation.world_size)
    return {
        "LOCAL_RANK": str(neighbours.index(worker)),
        "RANK": str(rank),
        "GROUP_RANK": str(nodes.index(node)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": _ROLE,
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(generation.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(generation.max_restarts),
        "TORCHELASTIC_RUN_ID": job,
        # Rank 0 finds a store at MASTER_ADDR, too, and does not make one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


_NO_SESSION = (
    "elastic.init() was called in a script that was started as torchrun starts scripts, since "
    "neither it nor the modules beside it import elastic; give --launch elastic"
)


class ClassicScript:
    """A child that waits at the other end of a pipe for its environment, then runs the script."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe
        self._status: int | None = None

    def begin(self, environment: Mapping[str, str]) -> None:
        """Have it run the script, with these variables."""
        data = json.dumps(dict(environment)).encode()
        with open(self._pipe, "wb") as told:
            told.write(data)

    def terminate(self) -> None:
        """SIGTERM to it and whatever else is in its process group; this process ignores it."""
        if self._status is None:
            os.killpg(os.getpgid(0), signal.SIGTERM)

    def wait(self) -> int:
        """Return when it has ended: its exit code, or minus the signal that ended it.

        Reaps also what the script has left behind, which are children of this process by now.
        """
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)
                return self._status


def run_when_told(pipe: int, argv: Sequence[str], *, module: bool = False) -> int:
    """In the child: wait for the environment, run the script, return its exit code."""
    with open(pipe, "rb") as told:
        data = told.read()
    if not data:
        return ExitCode.OK  # the parent has ended, and the kernel ends this process
    os.environ.update(json.loads(data))
    sessions.refuse(_NO_SESSION)
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    process = os.getpid()
    try:
        run_program(argv, module=module)
    except SystemExit as ending:
        return exit_code_of(ending)
    except BaseException as error:  # noqa: BLE001 - whatever the script raised ends the process
        code = error.exit_code if isinstance(error, ElasticError) else ExitCode.SCRIPT_FAILED
        if os.getpid() == process:  # a process that the script has forked does not speak for it
            _record(error, int(code), error_file)
        tell_uncaught(error)
        return int(code)
    return ExitCode.OK


def _record(error: BaseException, code: int, path: Path) -> None:
    """As torch's `record` reports, if the script does not use it."""
    message = {
        "message": in_words(error),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
        "errorCode": code,
    }
    with contextlib.suppress(OSError):  # no space: the log has it
        if not path.exists() or code != ExitCode.SCRIPT_FAILED:
            path.write_text(json.dumps({"message": message}))


def failure_of(worker: str, status: int, error_file: Path) -> Failure:
    """What the end of the script with a status other than 0 means, with what it left in the file.

    Read as torch's ProcessFailure reads it.
    """
    if status < 0:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=-status,
            signature=f"signal {-status}",
            message=f"was ended by {signal_name(-status)}",
        )
    recorded = _recorded(error_file)
    if recorded is None:
        message = f"the script ended with exit code {status}"
        return Failure(
            worker=worker,
            kind=FailureKind.EXIT_CODE,
            code=status,
            signature=f"exit code {status}",
            message=message,
        )
    message, stack, code = recorded
    return Failure(
        worker=worker,
        kind=FailureKind.EXCEPTION,
        code=status,
        signature=message,
        message=message,
        traceback=stack,
        retryable=code != ExitCode.CONFIGURATION,
    )


def _recorded(path: Path) -> tuple[str, str, int] | None:
    """Message, traceback and error code from an error file; None without a legible one."""
    try:
        content: Any = json.loads(path.read_text(errors="replace"))
        message = content["message"]
        if isinstance(message, str):
            return message.splitlines()[0], message, 0
        first = str(message["message"]).strip().splitlines()
        stack = str(message.get("extraInfo", {}).get("py_callstack", ""))
        return first[0] if first else "?", stack, int(message.get("errorCode", 0))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except (OverflowError, RecursionError):  # a number or a depth that no such file has
        return None
