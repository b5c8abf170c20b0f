"""Runs a script that was written for torchrun, in a child of the worker process.

This process has the link to the agent, and hosts the store at which the script's group meets if the
script gets rank 0. The script is alone in its process, as under torchrun. The kernel reports how it
ended, and the store outlives it, because other members may still need the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.core.membership import Failure, FailureKind, Generation, WorkerId, signal_name
from elastic.core.worker.machine import Effect, ReportStatus, Worker
from elastic.errors import ElasticError, ExitCode, TransientError
from elastic.rpc.codec import failure_to_pb, generation_from_pb, status_to_pb
from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.process_title import set_worker_title
from elastic.v1 import job_pb2
from elastic.v1 import local_pb2 as pb
from elastic.worker import session as sessions
from elastic.worker.group.process_group import StoreHost, first_line
from elastic.worker.link import Link
from elastic.worker.process import as_torchrun
from elastic.worker.process.as_python import exit_code_of, format_error, run_program, tell_uncaught
from elastic.worker.process.children import die_with_parent
from elastic.worker.process.late_variables import LateVariables

_SIGN_OF_LIFE_S = 0.6  # well below the default of --silence-timeout-s
_LOOPBACK = "127.0.0.1"


def run_classic(
    request: pb.SpawnRequest, variables: LateVariables, streams: Sequence[int] = ()
) -> int:
    """Run a script in a child until it ends; return the exit code. Returns in both processes.

    streams: the descriptors of the standard streams of `elastic torchrun`.
    """
    read, write = os.pipe()
    this = os.getpid()
    child = os.fork()  # first: the child must inherit no thread and no socket
    if child == 0:
        os.close(write)
        die_with_parent(this)
        variables.obey_when_group_forms()
        return run_on_environment(read, request, streams)
    os.close(read)
    script = ClassicScript(child, write)
    for number in {*STRAY_SIGNALS, *as_torchrun.forwarded(request.torchrun)}:
        signal.signal(number, signal.SIG_IGN)
    name = Path(request.log_path).with_suffix(".error.json").name
    error_file = Path(request.socket_path).parent / name  # the disk of the logs may hang
    link = Link(request.worker, request.socket_path)
    run = request.torchrun if request.HasField("torchrun") else None
    return _ScriptSupervisor(link, script, request.argv[0], error_file, run, streams).run()


class _ScriptSupervisor:
    """The link's thread obeys the agent, the main thread waits for the script."""

    def __init__(
        self,
        link: Link,
        script: ClassicScript,
        name: str,
        error_file: Path,
        torchrun: pb.Torchrun | None = None,
        streams: Sequence[int] = (),
    ) -> None:
        self._link = link
        self._name = name
        self._script = script
        self._error_file = error_file
        self._torchrun = torchrun
        self._streams = streams
        self._environment: Mapping[str, str] = {}
        self._local_rank = 0
        self._tee: as_torchrun.Tee | None = None
        self._machine = Worker(link.worker, pid=os.getpid())
        self._lock = threading.Lock()
        self._host: StoreHost | None = None
        self._scripts_host: StoreHost | None = None
        """Of --master-port: the scripts meet there, and not where `_host` listens."""
        self._job = ""
        self._done = False
        self._asked_to_end = False
        self._signal = signal.SIGTERM
        self._dismissed = threading.Event()

    def run(self) -> int:
        """Return the exit code for the agent: OK or SCRIPT_FAILED, whatever the script's was."""
        self._link.hello()
        with self._lock:
            self._report(self._machine.attached())
        self._link.start(self._command, self._report_again, self._give_up)
        threading.Thread(target=self._beat, name="elastic-pulse", daemon=True).start()
        status = self._script.wait()
        self._tell_end(status)
        if status != 0 or not self._note_finished():
            failure = failure_of(self._link.worker, status, self._error_file)
            with self._lock:
                as_asked = self._asked_to_end and status != -signal.SIGKILL
            if not as_asked:
                self._link.send(failure=failure_to_pb(failure))
                return ExitCode.SCRIPT_FAILED
            if status not in {0, -self._signal, 128 + self._signal}:
                why = {"worker": self._link.worker, "message": failure.message}
                self._link.notice("failed_at_end", why)
            return ExitCode.OK  # what the script has left behind may end by itself
        self._dismissed.wait()
        return ExitCode.OK

    def _note_finished(self) -> bool:
        """Report that the script has ended. Returns False if it never began."""
        with self._lock:
            self._done = True
            if self._machine.status.generation == 0:
                return False
            self._report(self._machine.finished(0))
        return True

    # ---- on the link's thread

    def _command(self, command: pb.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "assignment":
            self._take_up(command.assignment)
        elif kind == "generation":
            self._announced(generation_from_pb(command.generation))
        elif kind == "terminate":
            self._terminate(command.terminate.group_after_s, command.terminate.signal)
        elif kind == "dismiss":
            self._dismissed.set()
        elif kind == "report_again":
            self._report_again()

    def _take_up(self, assignment: pb.Assignment) -> None:
        if self._host is not None:  # repeated: the first one crossed a report of this spare
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
            rank = generation.rank_of(self._link.worker)
            self._local_rank = int(environment["LOCAL_RANK"])
            if self._torchrun is not None:
                environment = self._as_torchrun(self._torchrun, environment)
            self._environment = environment
            self._script.begin(environment, self._local_rank)
            self._report(self._machine.joined(generation, 0))
        set_worker_title(self._link.worker, self._name, rank)
        if rank == 0:  # if this is a recovery, it ends here
            reformed = job_pb2.Reformed(worker=self._link.worker, generation=generation.number)
            self._link.send(reformed=reformed)

    def _as_torchrun(self, run: pb.Torchrun, environment: dict[str, str]) -> dict[str, str]:
        """Prepare what the script needs under torchrun; return its variables."""
        attempt, local_rank = environment["TORCHELASTIC_RESTART_COUNT"], self._local_rank
        directory = as_torchrun.directory_of(run, attempt, local_rank)
        if directory is not None:
            as_torchrun.make_files(run, local_rank, directory)
            self._error_file = directory / "error.json"
        if run.master_port and environment["RANK"] == "0":
            self._scripts_host = _host_at(run.master_addr, run.master_port)
        self._tee = as_torchrun.Tee(run, environment, local_rank, self._streams)
        self._tee.start()
        return as_torchrun.variables(run, environment, os.environ)

    def _tell_end(self, status: int) -> None:
        """Tell `elastic torchrun`, which prints a table of the scripts that failed."""
        if self._tee is not None:
            self._tee.finish()
        if self._torchrun is None or status == 0 or not self._environment:
            return
        told = {
            "worker": self._link.worker,
            "rank": self._environment["RANK"],
            "local_rank": str(self._local_rank),
            "attempt": self._environment["TORCHELASTIC_RESTART_COUNT"],
            "exit_code": str(status),
            "pid": str(self._script.pid),
            "host": socket.gethostname(),
            "asked": str(self._asked_to_end).lower(),
            "error_file": str(self._error_file) if self._error_file.exists() else "",
        }
        self._link.notice("script_ended", told)

    def _terminate(self, group_after_s: float, number: int) -> None:
        """Ask the script to end: its own process first, since it may need its loaders to save. If
        it has ended already, there is nothing to wait for.

        A script that has failed by now did not fail because it was asked to end.
        """
        with self._lock:
            if self._done:
                self._dismissed.set()
                return
            failed = self._script.has_ended() or self._error_file.exists()
            self._asked_to_end = self._asked_to_end or not failed
            self._signal = signal.Signals(number or signal.SIGTERM)
            self._script.terminate(self._signal)
        later = threading.Timer(group_after_s, self._script.terminate_group, (self._signal,))
        later.daemon = True
        later.start()

    def _give_up(self, error: Exception) -> None:
        """Report that this worker cannot work, and end it; the kernel ends the script with it."""
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
        """Ignore AbortGroup: the group of a classic script ends only with its members."""
        for effect in effects:
            if isinstance(effect, ReportStatus):
                self._link.send(status=status_to_pb(effect.status))

    def _beat(self) -> None:
        while not self._dismissed.wait(_SIGN_OF_LIFE_S):
            self._link.hello()


def _host_at(host: str, port: int) -> StoreHost:
    try:
        return StoreHost(host, (port, port))
    except TransientError as error:
        raise TransientError(
            f"no store can listen at port {port}, which --master-port or --rdzv-endpoint gives; "
            "end what else uses it, or give another one"
        ) from error


# Names and values are those of torch.distributed.elastic.agent.server.local_elastic_agent, 2.13.
_ROLE = "default"


def torchrun_environment(
    generation: Generation, worker: WorkerId, *, job: str, error_file: str
) -> dict[str, str]:
    """Return the environment variables for a member of the generation.

    Ranks on a node are consecutive, and so are local ranks, even if the node has fewer members than
    slots, because scripts use them as indices. error_file: where torch's `record` writes
    exceptions. Raises ValueError if `worker` is no member.
    """
    nodes = list(dict.fromkeys(m.node for m in generation.members))
    rank = generation.rank_of(worker)
    if rank is None:
        raise ValueError(f"{worker} is not a member of generation {generation.number}")
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
        # Makes rank 0, too, connect to the store at MASTER_ADDR instead of hosting its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


_NO_SESSION = (
    "elastic.init() was called, but the script runs in torchrun mode, because of --launch "
    "torchrun or `elastic torchrun`, or because neither it nor a module beside it imports elastic; "
    "use `elastic run --launch elastic`"
)


class ClassicScript:
    """The child process, which reads its environment from a pipe and then runs the script."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._group = os.getpgid(pid)
        self._status: int | None = None

    def begin(self, environment: Mapping[str, str], local_rank: int) -> None:
        """Make the child run the script with these environment variables."""
        data = json.dumps({"environment": dict(environment), "local_rank": local_rank}).encode()
        with open(self._pipe, "wb") as told:
            told.write(data)

    def has_ended(self) -> bool:
        """True if the process has ended, even if `wait` does not know that yet."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, options) is not None
        except ChildProcessError:  # `wait` has reaped it
            return True

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal to the script's process alone."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate_group(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal to the whole process group; this process ignores it."""
        if self._status is None:
            os.killpg(self._group, number)

    def wait(self) -> int:
        """Wait for the script's end; return its exit code, or minus the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        self._status = os.waitstatus_to_exitcode(status)
        return self._status


def run_on_environment(pipe: int, request: pb.SpawnRequest, streams: Sequence[int] = ()) -> int:
    """Wait for the environment, run the script and return its exit code. The child calls this."""
    with open(pipe, "rb") as told:
        data = told.read()
    if not data:
        return ExitCode.OK  # the parent has ended, and the kernel ends this process
    begin = json.loads(data)
    os.environ.update(begin["environment"])
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"] or os.devnull)
    argv = list(request.argv)
    if request.HasField("torchrun"):
        run, local_rank = request.torchrun, int(begin["local_rank"])
        directory = error_file.parent if run.log_dir else None
        as_torchrun.take_streams(run, local_rank, directory, streams)
        argv = as_torchrun.with_local_rank(argv, local_rank)
        if run.executes:
            return as_torchrun.execute([*run.program, *argv])
    sessions.refuse(_NO_SESSION)
    return _run_script(argv, error_file, module=request.module)


def _run_script(argv: Sequence[str], error_file: Path, *, module: bool) -> int:
    process = os.getpid()
    try:
        run_program(argv, module=module)
    except SystemExit as ending:
        return exit_code_of(ending)
    except BaseException as error:  # noqa: BLE001 - whatever the script raised ends the process
        code = error.exit_code if isinstance(error, ElasticError) else ExitCode.SCRIPT_FAILED
        if os.getpid() == process:  # processes that it has forked do not report
            _record(error, int(code), error_file)
        tell_uncaught(error)
        return int(code)
    return ExitCode.OK


def _record(error: BaseException, code: int, path: Path) -> None:
    """Write the error as torch's `record` does, in case the script does not use that."""
    message = {
        "message": format_error(error),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
        "errorCode": code,
    }
    with contextlib.suppress(OSError):  # the disk is full; the log has the error
        if not path.exists() or code != ExitCode.SCRIPT_FAILED:
            path.write_text(json.dumps({"message": message}))


def failure_of(worker: str, status: int, error_file: Path) -> Failure:
    """Return the failure of a script that ended with a status other than 0.

    Reads the error file that the script may have left, as torch's ProcessFailure does.
    """
    recorded = _recorded(error_file)
    if status == -signal.SIGTERM and recorded is not None:
        status = ExitCode.SCRIPT_FAILED  # it was ended while the interpreter shut down
    if status < 0:
        return Failure(
            worker=worker,
            kind=FailureKind.SIGNAL,
            code=-status,
            signature=f"signal {-status}",
            message=f"was ended by {signal_name(-status)}",
        )
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
    """Return the message's first line, the traceback (the whole message if there is none) and the
    error code from an error file; None if there is no such file or it cannot be read."""
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
    except (OverflowError, RecursionError):  # no error file has such numbers or such depth
        return None
