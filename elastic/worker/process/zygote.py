"""Imports torch once, forks the workers, and ends every process that they leave behind.

The zygote is the subreaper of its workers: it adopts what their processes leave behind, and reaps
it. What a worker has started has a mark (`owner_of`), by which the zygote finds what to end when
the worker has ended. If the keeper is gone, or the agent for longer than the grace period, it ends
every worker and itself. If the zygote is killed, the kernel ends the workers, and the keeper what
they leave.

A forked worker runs the user's script and reports how it ended. What it prints goes to a file in
memory, from which another child of the zygote writes its log.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage, and looking for it takes half a second

import argparse
import atexit
import contextlib
import faulthandler
import os
import random
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# A first DDP step imports these, which takes seconds. Forked workers need not do it again.
import torch._dynamo.utils
import torch.distributed
import torch.nn.parallel
import torch.optim

from elastic.core.membership import Failure, FailureKind
from elastic.errors import ConfigurationError, ElasticError, ExitCode, StateLost, Stranded
from elastic.rpc.codec import failure_to_pb
from elastic.rpc.framing import BadFrame, FrameDecoder, encode
from elastic.runtime import death_notice
from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.log_writer import LogWriter
from elastic.runtime.orphans import (
    CLEANER_S,
    KEEPER_GONE,
    adopt_orphans,
    children,
    end_children,
    is_cleaner,
    kill_descendants,
    mark_owner,
    owner_of,
    signal_group,
)
from elastic.runtime.process_title import set_title, set_worker_title
from elastic.runtime.run_directory import remove_if_abandoned
from elastic.runtime.stack_file import write_stacks_on_signal
from elastic.runtime.training_lease import TrainingLease
from elastic.v1 import local_pb2 as pb
from elastic.worker import session
from elastic.worker.group.peer_names import never_look_up_peers
from elastic.worker.link import Link, received
from elastic.worker.process.as_python import (
    code_of,
    exit_code_of,
    finalize_script,
    flush_output,
    format_error,
    run_program,
    tell_ending,
    tell_uncaught,
)
from elastic.worker.process.children import die_with_parent
from elastic.worker.process.late_variables import LateVariables
from elastic.worker.process.torchrun import run_classic
from elastic.worker.unfit import reason_behind

_HANDLED_SIGNALS = {signal.SIGCHLD, KEEPER_GONE, *STRAY_SIGNALS}
_EXIT_GRACE_S = 5.0  # for processes that a finished worker left behind
_MOST_CALLERS = 16  # at once; nothing but an agent should connect here
_REFUSED_S = 0.05
_RECONNECT_S = 60.0  # for a living agent to connect again
_AGENT_LOOK_S = 0.02
_FIRST_AGENT_S = 5.0  # for the agent that has started this zygote to connect


def main(argv: list[str]) -> int:
    """Serve agents, one at a time; return the exit code, in a forked worker that of its script."""
    options = _parse(argv[1:])
    listener = socket.socket(fileno=options.listener)
    listener.set_inheritable(False)
    streams = tuple(map(int, options.streams.split(","))) if options.streams else ()
    for descriptor in streams:
        os.set_inheritable(descriptor, False)
    zygote = _Zygote(
        listener, TrainingLease(options.lease), grace_s=options.grace_s, streams=streams
    )
    adopt_orphans()
    set_title("zygote")
    never_look_up_peers()
    gc.collect()
    gc.freeze()  # keeps the pages of imported modules shared after a fork
    gc.enable()
    task = zygote.serve()
    if task is not None:  # in a forked worker
        return task()
    remove_if_abandoned(options.directory)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, help="descriptor of a listening Unix socket")
    parser.add_argument(
        "--directory", type=Path, help="the run's directory; removed when the run is over"
    )
    parser.add_argument("--lease", type=int, help="descriptor of the page of the node's lease")
    parser.add_argument(
        "--streams", default="", help="descriptors of the standard streams of `elastic torchrun`"
    )
    parser.add_argument("--grace-s", type=float, help="how long to wait for another agent")
    return parser.parse_args(argv)


class _Zygote:
    def __init__(
        self,
        listener: socket.socket,
        lease: TrainingLease,
        *,
        grace_s: float,
        streams: tuple[int, ...] = (),
    ) -> None:
        self._listener = listener
        os.set_inheritable(lease.descriptor, False)
        self._lease = lease
        self._grace_s = grace_s
        self._streams = streams
        self._agent: socket.socket | None = None
        self._agent_process: int | None = None  # pidfd of the newest agent
        self._back_by = 0.0
        self._callers: dict[socket.socket, FrameDecoder] = {}  # not known to be agents
        self._alone_until: float = time.monotonic() + max(grace_s, _FIRST_AGENT_S)
        self._undelivered: list[pb.ZygoteEvent] = []  # events from when there was no agent
        self._keeper = os.getppid()
        self._log_writer = LogWriter()
        self._workers: dict[int, pb.Spawned] = {}
        self._ended: set[int] = set()  # workers, by pid
        self._orphans_until: dict[int, float] = {}
        self._decoder = FrameDecoder(pb.ZygoteRequest)
        self._ending = False

    def serve(self) -> Callable[[], int] | None:
        """Fork and reap until the zygote should end (None); in a forked worker return its task."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, lambda *_: None)
        # They may be inherited as blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            selector.register(self._log_writer.control, selectors.EVENT_READ)
            idle = False
            while not self._is_to_end(idle=idle):
                ready = {key.fileobj for key, _ in selector.select(self._timeout_s())}
                idle = not ready
                if wake_read in ready:
                    os.read(wake_read, 4096)
                self._reap()
                self._end_orphans()
                task = self._serve_ready(ready, selector)
                if task is not None:
                    os.close(wake_write)
                    os.close(wake_read)
                    return task
        self._log_writer.close()
        end_children()  # nobody can use them, and nobody else would end them
        return None

    def _is_to_end(self, *, idle: bool) -> bool:
        """idle: nobody waits for an answer. On a busy machine, which holds this process up, an
        agent may have connected before the time for it was over."""
        alone = idle and self._agent is None and time.monotonic() >= self._alone_until
        abandoned = alone and not self._agent_may_return()
        return self._ending or abandoned or os.getppid() != self._keeper

    def _agent_may_return(self) -> bool:
        """True if the agent lives, so that only its connection broke, and has some time left."""
        if self._agent_process is None or time.monotonic() >= self._back_by:
            return False
        ended, _, _ = select.select([self._agent_process], [], [], 0)
        return not ended

    def _serve_ready(
        self, ready: set[Any], selector: selectors.BaseSelector
    ) -> Callable[[], int] | None:
        if self._log_writer.control in ready and (told := self._log_writer.heard()) is not None:
            fields = {"worker": told[0], "reason": told[1]}
            self._send(pb.ZygoteEvent(notice=pb.Notice(name="output_lost", fields=fields)))
        callers = [caller for caller in self._callers if caller in ready]
        task = self._serve_agent(selector) if self._agent in ready else None
        for caller in callers if task is None else ():
            task = task or self._hear(caller, selector)
        if self._listener in ready and task is None:
            self._accept(selector)
        return task

    # ---- new connections

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left, or the caller has gone
            time.sleep(_REFUSED_S)  # the caller stays pending: without a pause this would spin
            return
        if len(self._callers) == _MOST_CALLERS:
            self._hang_up(next(iter(self._callers)), selector)
        self._callers[connection] = FrameDecoder(pb.ZygoteRequest)
        selector.register(connection, selectors.EVENT_READ)

    def _hear(
        self, caller: socket.socket, selector: selectors.BaseSelector
    ) -> Callable[[], int] | None:
        """Read a caller's first request. It replaces the agent only if it attaches as one."""
        data = received(caller)
        try:
            first: Any = next(self._callers[caller].feed(data), None) if data else None
        except BadFrame:
            data = b""
        if not data or (first is not None and not first.HasField("attach")):
            self._hang_up(caller, selector)
        elif first is not None:
            self._decoder = self._callers.pop(caller)
            self._attend(caller, selector)
            return self._obey(b"", selector)
        return None

    def _hang_up(self, caller: socket.socket, selector: selectors.BaseSelector) -> None:
        del self._callers[caller]
        selector.unregister(caller)
        caller.close()

    # ---- the agent

    def _attend(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Replace the agent. The newest one lives: it holds the lock of the run's directory."""
        self._drop_agent(selector)
        self._agent = connection
        self._watch_agent(connection)
        ready = pb.ZygoteReady(workers=self._workers.values(), keeper=self._keeper)
        self._send(pb.ZygoteEvent(ready=ready))
        undelivered, self._undelivered = self._undelivered, []
        for event in undelivered:
            self._send(event)

    def _watch_agent(self, connection: socket.socket) -> None:
        if self._agent_process is not None:
            os.close(self._agent_process)
            self._agent_process = None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        with contextlib.suppress(OSError):  # it has gone already
            self._agent_process = os.pidfd_open(struct.unpack("=3i", credentials)[0])

    def _drop_agent(self, selector: selectors.BaseSelector) -> None:
        if self._agent is not None:
            selector.unregister(self._agent)
            self._agent.close()
            self._agent = None
            self._alone_until = time.monotonic() + self._grace_s
            self._back_by = time.monotonic() + _RECONNECT_S

    def _serve_agent(self, selector: selectors.BaseSelector) -> Callable[[], int] | None:
        data = received(self._agent) if self._agent is not None else b""
        if not data:
            self._drop_agent(selector)
        return self._obey(data, selector)

    def _obey(self, data: bytes, selector: selectors.BaseSelector) -> Callable[[], int] | None:
        try:
            for request in self._decoder.feed(data):
                task = self._carry_out(request)
                if task is not None:
                    return task
        except BadFrame:
            self._drop_agent(selector)
        return None

    def _carry_out(self, request: Any) -> Callable[[], int] | None:
        if request.HasField("end"):
            self._ending = True
        elif request.HasField("kill"):
            self._kill(request.kill.worker, request.kill.signal)
        elif request.HasField("spawn"):
            return self._fork(request.spawn)
        return None

    def _send(self, event: pb.ZygoteEvent) -> None:
        """Send the event. If the agent is gone, keep a worker's end or a failed fork for the next
        one. If it lives but cannot be reached, close its connection: it would wait forever."""
        try:
            if self._agent is None:
                raise BrokenPipeError
            self._agent.sendall(encode(event))
        except OSError:
            if self._agent is not None:
                with contextlib.suppress(OSError):
                    self._agent.shutdown(socket.SHUT_RDWR)
            if event.HasField("exited") or event.HasField("not_spawned"):
                self._undelivered.append(event)

    # ---- workers

    def _fork(self, request: pb.SpawnRequest) -> Callable[[], int] | None:
        parent = os.getpid()
        outputs: tuple[int, ...] = ()
        try:
            output, appended = outputs = self._log_writer.new_output(request.worker)
            pid = os.fork()
        except OSError as error:  # pids.max, memory: the other workers must live on
            for descriptor in outputs:
                os.close(descriptor)
            failed = pb.NotSpawned(worker=request.worker, reason=error.strerror or str(error))
            self._send(pb.ZygoteEvent(not_spawned=failed))
            return None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in _HANDLED_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._listener.close()
            self._log_writer.close()
            if self._agent_process is not None:
                os.close(self._agent_process)
            for connection in (self._agent, *self._callers):
                if connection is not None:
                    connection.close()
            os.close(output)
            return lambda: become_worker(request, parent, self._lease, appended, self._streams)
        os.close(appended)
        self._log_writer.write(request.worker, pid, request.log_path, output)
        spawned = pb.Spawned(
            worker=request.worker,
            pid=pid,
            log_path=request.log_path,
            output=f"/proc/{parent}/fd/{output}",
        )
        self._workers[pid] = spawned
        self._ended.discard(pid)
        self._send(pb.ZygoteEvent(spawned=spawned))
        return None

    def _kill(self, worker: str, number: int) -> None:
        for pid, spawned in self._workers.items():
            if spawned.worker == worker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)  # it may not lead a process group yet
                if number == signal.SIGKILL:
                    kill_descendants(pid)
                else:
                    signal_group(pid, number)

    def _reap(self) -> None:
        """Reap ended children. A worker's process group gets its signal before its pid can be used
        again."""
        while (status := _next_dead()) is not None:
            pid = status.si_pid
            signalled = status.si_code != os.CLD_EXITED
            spawned = self._workers.pop(pid, None)
            if spawned is not None:
                self._ended.add(pid)
                self._end_rest_of(pid, kindly=not signalled and status.si_status == 0)
            os.waitpid(pid, 0)
            self._log_writer.child_ended(pid)
            if self._orphans_until.pop(pid, None) is not None:
                self._find_orphans(grace_s=0.0)
            if spawned is not None:
                self._log_writer.worker_ended(spawned.worker)
                code = 0 if signalled else status.si_status
                number = status.si_status if signalled else 0
                exited = pb.Exited(worker=spawned.worker, pid=pid, exit_code=code, signal=number)
                self._send(pb.ZygoteEvent(exited=exited))

    def _end_rest_of(self, pid: int, *, kindly: bool) -> None:
        """End what an ended worker has left behind; kindly: give it time to end by itself."""
        if kindly:
            signal_group(pid, signal.SIGTERM)
        self._find_orphans(grace_s=_EXIT_GRACE_S if kindly else 0.0)
        self._orphans_until.pop(pid, None)  # the worker itself
        self._end_orphans()

    def _find_orphans(self, *, grace_s: float) -> None:
        """Note what ended workers have left behind. Cleaners get time in any case. What an orphan
        leaves behind in turn gets no more time."""
        now = time.monotonic()
        try:
            present = list(children())
        except OSError:  # no descriptor is left: found when the next worker ends
            return
        for child in present:
            if child in self._workers or child in self._orphans_until:
                continue
            with contextlib.suppress(OSError):  # it has ended
                if owner_of(child) in self._ended:
                    least_s = CLEANER_S if is_cleaner(child) else 0.0
                    self._orphans_until[child] = now + max(grace_s, least_s)

    def _end_orphans(self) -> None:
        now = time.monotonic()
        for orphan, until in self._orphans_until.items():
            if now >= until:
                kill_descendants(orphan)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)

    def _timeout_s(self) -> float | None:
        if self._orphans_until:
            return 0.1
        if self._agent is None:
            left_s = self._alone_until - time.monotonic()
            return left_s if left_s > 0.0 else _AGENT_LOOK_S
        return None


def _next_dead() -> Any:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


# ---- in a forked worker


def become_worker(
    request: pb.SpawnRequest,
    parent: int,
    lease: TrainingLease,
    output: int,
    streams: tuple[int, ...] = (),
) -> int:
    """Cut the ties to the zygote, then run the script; return the exit code. output: a descriptor
    at which it appends what it prints. streams: those of `elastic torchrun`, see run_classic."""
    own_lease = lease.share()  # first: it is that of the epoch in which the process started
    _redirect_output(output)  # first: errors belong in the log
    # Each worker has its own process group, but the zygote's session. If the kernel schedules by
    # session (sched_autogroup_enabled), members with a session each, as under torchrun, wake each
    # other more slowly: steps take 5% longer with 2 or 3 workers on 2 cores.
    os.setpgid(0, 0)
    die_with_parent(parent)
    mark_owner()
    os.environ.update(request.environment)
    set_worker_title(request.worker, request.argv[0])
    _reseed(torchs=request.classic)
    faulthandler.enable()  # a segmentation fault leaves its stacks in the log
    write_stacks_on_signal()
    with contextlib.suppress(OSError):  # no descriptor is left: its end is known a little later
        death_notice.hold()
    variables = LateVariables()
    if request.classic:
        return run_classic(request, variables, streams)
    link = Link(request.worker, request.socket_path)
    session.use_link(link, own_lease, variables)
    return run_script(link, list(request.argv), module=request.module)


def _redirect_output(output: int) -> None:
    """Append what is printed, line by line, as to a terminal, so that the log is up to date."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reseed(*, torchs: bool) -> None:
    """Seed random and numpy, as a fresh interpreter would: forks share the zygote's generators.

    torchs: seed torch's as well, so that ranks differ, and restarts, as under torchrun. Workers of
    an elastic script need not: what they build without a seed, and do not track, is then the same
    on a node, also in a worker that joins.
    """
    random.seed()
    if torchs:
        torch.default_generator.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


_NO_GROUP = (
    "the group forms when session.steps() begins: call torch.distributed inside of its loop, use "
    "session.distribute(model) instead of DistributedDataParallel, and remove init_process_group()"
)
_NO_INPUT = (
    "a worker has no terminal, and its standard input is empty; pass the value as an argument, or "
    "debug with: python SCRIPT (a job of one worker)"
)
_NO_RANK = (
    "a worker's rank changes with the group, so no variable has it: use session.rank and "
    "session.world_size inside of the loop over session.steps(), and session.local_rank or "
    "session.device above it; or give --launch torchrun, if the script was written for torchrun"
)
_OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Advice for errors of torch and Python in a script that expects torchrun, and of Python in a script
# that reads from a terminal.
_ADVICE = {
    **{f"KeyError: '{name}'": _NO_RANK for name in _OF_TORCHRUN},
    "Default process group has not been initialized": _NO_GROUP,
    "env:// rendezvous": _NO_GROUP,
    "trying to initialize the default process group twice": _NO_GROUP,
    "EOFError: EOF when reading a line": _NO_INPUT,
    "bdb.BdbQuit": _NO_INPUT,
}


def run_script(link: Link, argv: list[str], *, module: bool = False) -> int:
    """Run `argv[0]`, a script or a module's name, as `python` would; return the exit code.

    It returns, too, in each process that the script has forked and that reaches the script's end.
    Such a process is no worker, and ends as it would with plain Python.
    """
    worker = os.getpid()
    link.hello()
    program = f"-m {argv[0]}" if module else argv[0]
    try:
        run_program(argv, module=module)
        if os.getpid() == worker:
            _finish(program)
    except SystemExit as ending:
        if os.getpid() != worker:
            return exit_code_of(ending)
        return _exited(link, ending, program)
    except BaseException as error:  # noqa: BLE001 - whatever the script raised ends the process
        if os.getpid() != worker:
            tell_uncaught(error)
            return ExitCode.SCRIPT_FAILED
        return _raised(link, error)
    return ExitCode.OK


def _finish(script: str, where: str = "") -> None:
    training = session.current_training()
    if training is None and {"-h", "--help"} & set(sys.argv[1:]):
        raise ConfigurationError(
            f"{script} printed its help and ended without calling elastic.init(), so there is "
            f"nothing to train; to see its options, run: python {script} --help"
        )
    if training is None:
        raise ConfigurationError(
            f"{script} ended without calling elastic.init(); call it once, before the model is "
            "built, and train in `for step in session.steps(...)`; or give --launch torchrun, if "
            "the script was written for torchrun"
        )
    training.finish(where)


def _exited(link: Link, ending: SystemExit, script: str) -> int:
    """Handle sys.exit() and return the exit code. 0 is a normal end, everything else a failure."""
    code = code_of(ending)
    if code == ExitCode.OK:
        try:
            _finish(script, _place(ending))
        except BaseException as error:  # noqa: BLE001 - as above
            return _raised(link, error)
        return ExitCode.OK
    failure = Failure(
        worker=link.worker,
        kind=FailureKind.EXIT_CODE,
        code=code,
        signature=_signature(ending),
        message=f"ended its script with sys.exit({_shown(ending.code)})",
    )
    _report(link, failure)
    tell_ending(ending)
    return code


def _shown(value: object) -> str:
    """Return a repr: `sys.exit(main())` exits with what main() returns, which may be anything."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - the script's own __repr__
        return f"a {type(value).__name__}"


def _raised(link: Link, error: BaseException) -> int:
    code = error.exit_code if isinstance(error, ElasticError) else ExitCode.SCRIPT_FAILED
    words = format_error(error)
    advice = next((a for said, a in _ADVICE.items() if said in words), "")
    if not isinstance(error, ElasticError) and (reason := reason_behind(error)) is not None:
        code, advice = ExitCode.CONFIGURATION, reason
    stranded = isinstance(error, Stranded)  # not the script's fault
    failure = Failure(
        worker=link.worker,
        kind=FailureKind.LEFT_OUT if stranded else FailureKind.EXCEPTION,
        code=int(code),
        signature=_signature(error),
        message=f"{words} ({advice})" if advice else words,
        traceback="".join(traceback.format_exception(error)),
        retryable=code != ExitCode.CONFIGURATION and not isinstance(error, StateLost),
        state_lost=isinstance(error, StateLost),
    )
    _report(link, failure)
    tell_uncaught(error)  # last: stderr may be closed, and a hook may do anything
    return int(code)


def _report(link: Link, failure: Failure) -> None:
    """Free the peers, then say why. They must not wait until this process has ended."""
    training = session.current_training()
    if training is not None:
        training.control.membership.abandon()
        training.control.reports.script_failed()
    link.send(failure=failure_to_pb(failure))


def _signature(error: BaseException) -> str:
    """Return type and place: the same for the same fault, whatever values its text has."""
    return f"{type(error).__name__} at {_place(error)}"


def _place(error: BaseException) -> str:
    """Return file and line of the innermost frame that is not in elastic/worker, or "?"."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    own = [f for f in frames if not f.filename.startswith((package, "<frozen"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "?"


def _end_process(code: int) -> NoReturn:
    """End as multiprocessing ends its forks: exit handlers run, and what the script has made is
    finalized, but the zygote's modules are not torn down, which would take seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    finalize_script()
    flush_output()
    os._exit(code)


if __name__ == "__main__":
    _end_process(main(sys.argv))
