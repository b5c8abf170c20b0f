"""Imports torch once, then forks workers that need not; the parent and the end of them all.

Each worker is the subreaper of what it starts, and the zygote of the workers: whatever a worker
leaves behind becomes the zygote's child when the worker ends, and is ended. When its keeper is
gone, or its agent for longer than the grace, it ends every worker and itself. When it is killed,
the kernel ends the workers, and its keeper what they leave.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # nothing of what is imported is garbage; to look for it takes half a second

import argparse
import atexit
import contextlib
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# What a first DDP step imports, seconds of work that forked workers share.
import torch._dynamo.utils
import torch.distributed
import torch.nn.parallel
import torch.optim  # noqa: F401

from elastic.rpc.framing import BadFrame, FrameDecoder, encode
from elastic.runtime.keeper import KEEPER_GONE
from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.orphans import adopt_orphans, children, end_children, signal_group
from elastic.runtime.process_title import set_title
from elastic.runtime.run_directory import remove_if_left
from elastic.v1 import local_pb2 as pb
from elastic.worker.group.peer_names import never_look_up_peers
from elastic.worker.process.as_python import flush_output
from elastic.worker.process.forked import become_worker

_HEARD = {signal.SIGCHLD, KEEPER_GONE, *STRAY_SIGNALS}
_EXIT_GRACE_S = 5.0  # for processes that a finished worker left behind
_MOST_CALLERS = 16  # at once; nothing but an agent should connect here
_REFUSED_S = 0.05
_BACK_S = 60.0  # for an agent that lives to connect again: it may be starting anew
_AGENT_LOOK_S = 0.02
_FIRST_AGENT_S = 5.0  # for the agent that has started this zygote to connect


def main(argv: list[str]) -> int:
    """Serve agents, one at a time."""
    options = _parse(argv[1:])
    listener = socket.socket(fileno=options.listener)
    listener.set_inheritable(False)
    zygote = _Zygote(listener, grace_s=options.grace_s)
    adopt_orphans()
    set_title("zygote")
    never_look_up_peers()
    gc.collect()
    gc.freeze()  # keeps the pages of what was imported shared after a fork
    gc.enable()
    task = zygote.serve()
    if task is not None:  # in a forked worker
        return task()
    remove_if_left(options.directory)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, help="descriptor of a listening Unix socket")
    parser.add_argument("--directory", type=Path, help="the run's; removed if the run is over")
    parser.add_argument("--grace-s", type=float, help="how long to wait for another agent")
    return parser.parse_args(argv)


class _Zygote:
    def __init__(self, listener: socket.socket, *, grace_s: float) -> None:
        self._listener = listener
        self._grace_s = grace_s
        self._agent: socket.socket | None = None
        self._agent_process: int | None = None  # a pidfd of the newest agent's
        self._back_by = 0.0
        self._callers: dict[socket.socket, FrameDecoder] = {}  # who have not said what they are
        self._alone_until: float = time.monotonic() + max(grace_s, _FIRST_AGENT_S)
        self._untold: list[pb.ZygoteEvent] = []  # what happened while there was no agent
        self._keeper = os.getppid()
        self._workers: dict[int, pb.Spawned] = {}
        self._orphans_until: dict[int, float] = {}
        self._decoder = FrameDecoder(pb.ZygoteRequest)
        self._ending = False

    def serve(self) -> Callable[[], int] | None:
        """Fork and reap until it is to end (None), or return a forked worker's task."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in _HEARD:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # whatever has started the agent
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while not self._is_to_end():
                ready = {key.fileobj for key, _ in selector.select(self._timeout_s())}
                if wake_read in ready:
                    os.read(wake_read, 4096)
                self._reap()
                self._end_orphans()
                task = self._serve_ready(ready, selector)
                if task is not None:
                    os.close(wake_write)
                    os.close(wake_read)
                    return task
        end_children()  # nobody could use them, nobody else would end them
        return None

    def _is_to_end(self) -> bool:
        alone = self._agent is None and time.monotonic() >= self._alone_until
        abandoned = alone and not self._agent_may_return()
        return self._ending or abandoned or os.getppid() != self._keeper

    def _agent_may_return(self) -> bool:
        """It lives, and only its connection broke."""
        if self._agent_process is None or time.monotonic() >= self._back_by:
            return False
        ended, _, _ = select.select([self._agent_process], [], [], 0)
        return not ended

    def _serve_ready(
        self, ready: set[Any], selector: selectors.BaseSelector
    ) -> Callable[[], int] | None:
        callers = [caller for caller in self._callers if caller in ready]
        task = self._serve_agent(selector) if self._agent in ready else None
        for caller in callers if task is None else ():
            task = task or self._hear(caller, selector)
        if self._listener in ready and task is None:
            self._accept(selector)
        return task

    # ---- who calls

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left, or the caller has gone
            time.sleep(_REFUSED_S)  # it is still there, and would be asked for again at once
            return
        if len(self._callers) == _MOST_CALLERS:
            self._hang_up(next(iter(self._callers)), selector)
        self._callers[connection] = FrameDecoder(pb.ZygoteRequest)
        selector.register(connection, selectors.EVENT_READ)

    def _hear(
        self, caller: socket.socket, selector: selectors.BaseSelector
    ) -> Callable[[], int] | None:
        """Only who speaks as an agent does takes the place of the one there is."""
        data = _receive(caller)
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
        """The newest agent is the one that lives: it holds the lock of the run's directory."""
        self._drop_agent(selector)
        self._agent = connection
        self._watch_agent(connection)
        ready = pb.ZygoteReady(workers=self._workers.values(), keeper=self._keeper)
        self._send(pb.ZygoteEvent(ready=ready))
        untold, self._untold = self._untold, []
        for event in untold:
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
            self._back_by = time.monotonic() + _BACK_S

    def _serve_agent(self, selector: selectors.BaseSelector) -> Callable[[], int] | None:
        data = _receive(self._agent) if self._agent is not None else b""
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
        """What an agent that is gone misses is told the next one. One that lives but cannot be
        told is hung up on: it would wait for ever for what it does not hear."""
        try:
            if self._agent is None:
                raise BrokenPipeError
            self._agent.sendall(encode(event))
        except OSError:
            if self._agent is not None:
                with contextlib.suppress(OSError):
                    self._agent.shutdown(socket.SHUT_RDWR)
            if event.HasField("exited") or event.HasField("not_spawned"):
                self._untold.append(event)

    # ---- workers

    def _fork(self, request: pb.SpawnRequest) -> Callable[[], int] | None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # pids.max, memory: those that live must not suffer for it
            failed = pb.NotSpawned(worker=request.worker, reason=error.strerror or str(error))
            self._send(pb.ZygoteEvent(not_spawned=failed))
            return None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in _HEARD:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._listener.close()
            if self._agent_process is not None:
                os.close(self._agent_process)
            for connection in (self._agent, *self._callers):
                if connection is not None:
                    connection.close()
            return lambda: become_worker(request, parent)
        spawned = pb.Spawned(worker=request.worker, pid=pid, log_path=request.log_path)
        self._workers[pid] = spawned
        self._send(pb.ZygoteEvent(spawned=spawned))
        return None

    def _kill(self, worker: str, number: int) -> None:
        for pid, spawned in self._workers.items():
            if spawned.worker == worker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)  # it may not lead its group yet
                signal_group(pid, number)

    def _reap(self) -> None:
        """Collect the dead. A worker's group is ended before its pid can be used again."""
        while (status := _next_dead()) is not None:
            pid = status.si_pid
            signalled = status.si_code != os.CLD_EXITED
            if pid in self._workers:
                self._adopt_rest_of(pid, kindly=not signalled and status.si_status == 0)
            elif pid in self._orphans_until:
                self._adopt_rest_of(pid, kindly=False)
            os.waitpid(pid, 0)
            self._orphans_until.pop(pid, None)
            if (spawned := self._workers.pop(pid, None)) is not None:
                code = 0 if signalled else status.si_status
                number = status.si_status if signalled else 0
                exited = pb.Exited(worker=spawned.worker, pid=pid, exit_code=code, signal=number)
                self._send(pb.ZygoteEvent(exited=exited))

    def _adopt_rest_of(self, pid: int, *, kindly: bool) -> None:
        """What a worker leaves behind: time to end by itself if the worker ended well.

        All children that are new belong to the one that has just ended: those of a living worker
        are its own. What an orphan leaves behind in its turn has had its time.
        """
        signal_group(pid, signal.SIGTERM if kindly else signal.SIGKILL)
        now = time.monotonic()
        for orphan in self._children():
            if orphan not in self._workers and orphan not in self._orphans_until:
                self._orphans_until[orphan] = now + (_EXIT_GRACE_S if kindly else 0.0)

    def _children(self) -> list[int]:
        try:
            return list(children())
        except OSError:  # no descriptor is left: found at the next worker's end
            return []

    def _end_orphans(self) -> None:
        now = time.monotonic()
        for orphan, until in self._orphans_until.items():
            if now >= until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)

    def _timeout_s(self) -> float | None:
        if self._orphans_until:
            return 0.1
        if self._agent is None:
            left_s = self._alone_until - time.monotonic()
            return left_s if left_s > 0.0 else _AGENT_LOOK_S
        return None


def _receive(connection: socket.socket) -> bytes:
    """What has come; nothing at the end."""
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _next_dead() -> Any:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _end_process(code: int) -> NoReturn:
    """End as multiprocessing ends its forks: everything registered runs, but the interpreter is
    not taken apart, which takes seconds for the modules that came with the zygote."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush_output()
    os._exit(code)


if __name__ == "__main__":
    _end_process(main(sys.argv))
