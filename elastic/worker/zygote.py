"""Imports torch once, then forks workers that need not; the parent and the end of them all.

Each worker is the subreaper of what it starts, and the zygote of the workers: whatever a worker
leaves behind becomes the zygote's child when the worker ends, and is ended. When its agent or its
keeper is gone it ends every worker and itself. When it is killed, the kernel ends the workers, and
its keeper what they leave.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import random
import selectors
import signal
import socket
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

from elastic.rpc.framing import FrameDecoder, encode
from elastic.runtime.keeper import KEEPER_GONE
from elastic.runtime.orphans import adopt_orphans, children, end_children, signal_group
from elastic.runtime.run_directory import remove_if_left
from elastic.v1 import local_pb2 as pb
from elastic.worker import session
from elastic.worker.bootstrap import run_script
from elastic.worker.link import Link
from elastic.worker.process import die_with_parent

_EXIT_GRACE_S = 5.0  # for processes that a finished worker left behind
STACK_DUMP_SIGNAL = signal.SIGUSR2


def main(argv: list[str]) -> int:
    """Serve the agent on the inherited socket `argv[1]`; its run's directory is `argv[2]`."""
    agent = socket.socket(fileno=int(argv[1]))
    zygote = _Zygote(agent)
    adopt_orphans()
    gc.collect()
    gc.freeze()  # keeps the pages of what was imported shared after a fork
    task = zygote.serve()
    if task is not None:  # in a forked worker
        return task()
    remove_if_left(Path(argv[2]))
    return 0


class _Zygote:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._keeper = os.getppid()
        self._workers: dict[int, str] = {}
        self._orphans_until: dict[int, float] = {}
        self._decoder = FrameDecoder(pb.ZygoteRequest)

    def serve(self) -> Callable[[], int] | None:
        """Fork and reap until it is to end (None), or return a forked worker's task."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGCHLD, KEEPER_GONE):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._agent, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            self._send(ready=pb.ZygoteReady())
            while True:
                ready = {key.fd for key, _ in selector.select(self._timeout_s())}
                if wake_read in ready:
                    os.read(wake_read, 4096)
                self._reap()
                self._end_orphans()
                data = self._receive() if self._agent.fileno() in ready else None
                if data == b"" or os.getppid() != self._keeper:
                    end_children()  # nobody could use them, nobody else would end them
                    return None
                if data is None:
                    continue
                for request in self._decoder.feed(data):
                    task = self._carry_out(request)
                    if task is not None:
                        os.close(wake_write)
                        os.close(wake_read)
                        return task

    def _carry_out(self, request: Any) -> Callable[[], int] | None:
        if request.HasField("kill"):
            self._kill(request.kill.worker, request.kill.signal)
            return None
        return self._fork(request.spawn)

    def _fork(self, request: pb.SpawnRequest) -> Callable[[], int] | None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, KEEPER_GONE):
                signal.signal(number, signal.SIG_DFL)
            self._agent.close()
            return lambda: _become_worker(request, parent)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # also here: a kill must not come before the child's own call
        self._workers[pid] = request.worker
        self._send(spawned=pb.Spawned(worker=request.worker, pid=pid))
        return None

    def _kill(self, worker: str, number: int) -> None:
        for pid, name in self._workers.items():
            if name == worker:
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
            if (worker := self._workers.pop(pid, None)) is not None:
                code = 0 if signalled else status.si_status
                number = status.si_status if signalled else 0
                self._send(exited=pb.Exited(worker=worker, pid=pid, exit_code=code, signal=number))

    def _adopt_rest_of(self, pid: int, *, kindly: bool) -> None:
        """What a worker leaves behind: time to end by itself if the worker ended well.

        All children that are new belong to the one that has just ended: those of a living worker
        are its own. What an orphan leaves behind in its turn has had its time.
        """
        signal_group(pid, signal.SIGTERM if kindly else signal.SIGKILL)
        now = time.monotonic()
        for orphan in children():
            if orphan not in self._workers and orphan not in self._orphans_until:
                self._orphans_until[orphan] = now + (_EXIT_GRACE_S if kindly else 0.0)

    def _end_orphans(self) -> None:
        now = time.monotonic()
        for orphan, until in self._orphans_until.items():
            if now >= until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)

    def _timeout_s(self) -> float | None:
        return 0.1 if self._orphans_until else None

    def _receive(self) -> bytes:
        try:
            return self._agent.recv(65536)
        except OSError:
            return b""

    def _send(self, **kind: Any) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: the next read says so
            self._agent.sendall(encode(pb.ZygoteEvent(**kind)))


def _next_dead() -> Any:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _become_worker(request: pb.SpawnRequest, parent: int) -> int:
    """In the forked child: cut the ties to the zygote, then run the script."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    adopt_orphans()  # so that it is known whose daemons they are that outlive it
    _redirect_output(request.log_path)
    os.environ.update(request.environment)
    _reseed()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    link = Link(request.worker, request.socket_path)
    session.use_link(link)
    return run_script(link, list(request.argv))


def _end_process(code: int) -> NoReturn:
    """End as multiprocessing ends its forks: everything registered runs, but the interpreter is
    not taken apart, which takes seconds for the modules that came with the zygote."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reseed() -> None:
    """Forks share the zygote's generators; a fresh interpreter would have seeded its own."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    _end_process(main(sys.argv))
