"""Starts the zygote or finds an earlier agent's, asks it to fork and kill, and finds out whether
the kernel killed a worker because memory was used up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from elastic.agent.logs import last_lines
from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.framing import encode, read_message
from elastic.runtime.log_retention import hold
from elastic.runtime.orphans import NO_OWNER, OWNER, end_marked
from elastic.runtime.training_lease import TrainingLease
from elastic.timeouts import timeout
from elastic.v1 import local_pb2 as pb

# Like `python -m`, but without the current directory in sys.path, as for `python train.py`: a
# `logging.py` there must not be imported. elastic itself may then be missing, so its root is added.
_BEGIN = """\
import sys
if not sys.path[0]:
    del sys.path[0]
import importlib.util, runpy
root, module = sys.argv[1:3]
del sys.argv[1:3]
if importlib.util.find_spec("elastic") is None:
    sys.path.append(root)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_ROOT = str(Path(__file__).parents[2])
_KEEPER = "elastic.runtime.keeper"
_ZYGOTE = "elastic.worker.process.zygote"
_SOCKET = "zygote.sock"
_MARK = "_ELASTIC_RUN_DIRECTORY"  # in the environment of all processes that it starts
_EXIT_GRACE_S = 5.0
_NO_PROGRAM = {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP}
_RETRY_S, _TRIES = 0.1, 50  # to connect again to a zygote that lives
_log = logging.getLogger(__name__)


class ZygoteProcess:
    """One zygote. Its events go to `on_event`; `on_lost` is called at its unexpected end.

    lease: the node's lease to train, for a zygote that is started; one that is found has its own.
    grace_s: seconds that the zygote and its workers outlive an agent that is killed. hold: a file
    that the zygote keeps open for as long as it lives. passes_streams: workers have this process's
    standard streams.

    The keeper is this process's only child in the run, apart from orphans after the keeper's end.
    """

    def __init__(
        self,
        *,
        run_directory: Path,
        log: Path,
        environment: Mapping[str, str],
        on_event: Callable[[pb.ZygoteEvent], None],
        on_lost: Callable[[], None],
        lease: TrainingLease,
        grace_s: float = 0.0,
        hold: IO[str] | None = None,
        passes_streams: bool = False,
    ) -> None:
        self._run_directory = run_directory
        self._log = log
        self._environment = dict(environment)
        self._on_event = on_event
        self._on_lost = on_lost
        self._lease = lease
        self._grace_s = grace_s
        self._hold = hold
        self._passes_streams = passes_streams
        self._keeper: subprocess.Popen[bytes] | _Found | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: list[bytes] = []  # requests made before it was started
        self._closing = False
        self._answered = asyncio.Event()
        """Set once it has answered, or its connection has ended."""
        # Requests that the zygote may not have received if the connection breaks.
        self._spawning: dict[str, bytes] = {}
        self._killing: dict[str, bytes] = {}
        self.was_ready = False
        """True once it has imported torch and answered."""

    async def open(self) -> bool:
        """Find or start the zygote; True if it is an earlier agent's.

        Raises TransientError, ConfigurationError or OSError if it cannot be started.
        """
        path = str(self._run_directory / _SOCKET)
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(path)
            found = True
        except OSError:
            await asyncio.to_thread(self._end_left)
            self._keeper = self._start(path)
            try:
                self._reader, self._writer = await asyncio.open_unix_connection(path)
            except OSError as error:
                raise TransientError(
                    f"cannot connect to the zygote that was just started: {error.strerror}; its "
                    f"log: {self._log}; try again"
                ) from error
            found = False
        self._writer.write(encode(pb.ZygoteRequest(attach=pb.AttachRequest())))
        return found

    async def run(self) -> None:
        """Read events until the zygote ends. After a broken connection, which leaves its workers
        alive, connect again."""
        if self._reader is None or self._writer is None:
            await self.open()
        assert self._writer is not None
        self._writer.writelines(self._waiting)
        await self._read()
        while not self._closing and await self._connect_again():
            await self._read()
        if not self._closing:
            await self._reap()
            await asyncio.to_thread(self._end_left)
            self._forget_keeper()
            self._on_lost()

    async def _read(self) -> None:
        try:
            while (event := await self._next()) is not None:
                self._take(event)  # an error here does not mean that the connection broke
        finally:
            self._answered.set()

    async def _next(self) -> pb.ZygoteEvent | None:
        """Return the next event; None once the connection has ended or broken."""
        assert self._reader is not None
        with contextlib.suppress(OSError):
            return await read_message(self._reader, pb.ZygoteEvent)
        return None

    async def _connect_again(self) -> bool:
        """Return False when the zygote is gone: nobody listens."""
        assert self._writer is not None
        self._writer.close()
        path = str(self._run_directory / _SOCKET)
        for _ in range(_TRIES):
            try:
                self._reader, self._writer = await asyncio.open_unix_connection(path)
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError as error:
                _log.warning("cannot reconnect to the zygote: %s", error.strerror)
                await asyncio.sleep(_RETRY_S)
                continue
            self._writer.write(encode(pb.ZygoteRequest(attach=pb.AttachRequest())))
            return True
        return False

    def spawn(self, request: pb.SpawnRequest) -> None:
        self._spawning[request.worker] = encode(pb.ZygoteRequest(spawn=request))
        self._send(spawn=request)

    def kill(self, worker: str, number: signal.Signals) -> None:
        """Send a signal to a worker's whole process group."""
        request = pb.KillRequest(worker=worker, signal=number)
        if number == signal.SIGKILL:
            self._killing[worker] = encode(pb.ZygoteRequest(kill=request))
        self._send(kill=request)

    async def close(self) -> None:
        """Have the zygote end its workers, then itself."""
        self._closing = True
        self._send(end=pb.EndRequest())
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
        if self._is_strange:
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(_EXIT_GRACE_S):
                    await self._answered.wait()
        elif not self.was_ready:  # it has no worker yet, and does not read requests
            self._kill_group()
        if self._is_strange or not await self._reap():
            await asyncio.to_thread(self._end_left)
        if self._writer is not None:
            self._writer.close()
        self._forget_keeper()

    @property
    def _is_strange(self) -> bool:
        """It was found, and has not told which process is its keeper."""
        return self._writer is not None and self._keeper is None and not self.was_ready

    def let_go(self) -> None:
        """Leave the zygote and its workers to the next agent."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        self._forget_keeper()

    def exit_reason(self) -> TransientError:
        """An error that says how the zygote ended unexpectedly."""
        code = self._keeper.poll() if isinstance(self._keeper, subprocess.Popen) else None
        last = last_lines(self._log).strip().rpartition("\n")[2] if code else ""
        why = f"{code}: {last}" if last else f"{code}"
        return TransientError(f"the zygote ended unexpectedly ({why}); its log: {self._log}")

    def _end_left(self) -> None:
        """End the processes that a killed zygote and keeper left, which the mark identifies. It
        must not end all children of this process: some may be older than the agent, and in a
        container this process may be the first, which adopts others."""
        session = self._keeper.pid if self._keeper is not None else None
        left = end_marked(_MARK, str(self._run_directory), session=session)
        if left:
            _log.warning("these processes survived SIGKILL: %s", left)

    def _start(self, path: str) -> subprocess.Popen[bytes]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # only this user can connect
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen()
        directory, python = str(self._run_directory), [sys.executable, "-c", _BEGIN, _ROOT]
        page = str(self._lease.descriptor)
        zygote = [*python, _ZYGOTE, "--listener", str(listener.fileno()), "--directory", directory]
        zygote += ["--lease", page, "--grace-s", str(self._grace_s)]
        with listener, self._log.open("ab") as log, contextlib.ExitStack() as ends:
            hold(log.fileno())
            streams = [_copy_of(number) for number in range(3)] if self._passes_streams else []
            for stream in streams:
                ends.callback(os.close, stream)
            zygote += ["--streams", ",".join(map(str, streams))]
            try:
                return subprocess.Popen(
                    [*python, _KEEPER, directory, page, *zygote],
                    pass_fds=[listener.fileno(), self._lease.descriptor, *streams],
                    stdin=self._hold if self._hold is not None else subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment | {_MARK: directory, OWNER: NO_OWNER},
                    start_new_session=True,  # Ctrl-C on the terminal is the agent's to handle
                )
            except OSError as error:
                if error.errno not in _NO_PROGRAM:
                    raise
                raise ConfigurationError(
                    f"the workers' interpreter {sys.executable!r} cannot be run: "
                    f"{error.strerror}; it is the one that runs elastic itself: repair it or "
                    "reinstall it, and start elastic with an absolute path"
                ) from error

    def _take(self, event: pb.ZygoteEvent) -> None:
        kind = event.WhichOneof("kind")
        again, self.was_ready = self.was_ready, True
        self._answered.set()
        if kind == "ready" and self._keeper is None:
            self._keeper = _Found.of(event.ready.keeper)
        if kind == "ready" and again:
            self._make_up_for_break(event.ready)
            return
        if kind in ("spawned", "not_spawned", "exited"):
            self._spawning.pop(getattr(event, kind).worker, None)
        if kind in ("not_spawned", "exited"):
            self._killing.pop(getattr(event, kind).worker, None)
        self._on_event(event)

    def _make_up_for_break(self, ready: pb.ZygoteReady) -> None:
        """Repeat what was lost when the connection broke: events of spawned workers, and requests
        of this process. The zygote repeats exits by itself."""
        assert self._writer is not None
        for spawned in ready.workers:
            if self._spawning.pop(spawned.worker, None) is not None:
                self._on_event(pb.ZygoteEvent(spawned=spawned))
        self._writer.writelines([*self._spawning.values(), *self._killing.values()])

    async def _reap(self) -> bool:
        """Wait until zygote and keeper are gone; after _EXIT_GRACE_S kill them, and wait as long
        again. False if they had to be killed, and so may have left processes."""
        for kindly in (True, False):
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(_EXIT_GRACE_S):
                    await self._ended()
                return kindly
            self._kill_group()
        _log.warning("the zygote's keeper survived SIGKILL")
        return False

    async def _ended(self) -> None:
        while self._keeper is not None and self._keeper.poll() is None:
            await asyncio.sleep(0.01)

    def _forget_keeper(self) -> None:
        if isinstance(self._keeper, _Found):
            self._keeper.forget()

    def _kill_group(self) -> None:
        """Kill the keeper and the zygote, which share a process group."""
        keeper = self._keeper
        if keeper is not None and keeper.poll() is None:  # else the pid may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(keeper.pid, signal.SIGKILL)

    def _send(self, **kind: Any) -> None:
        request = encode(pb.ZygoteRequest(**kind))
        if self._writer is None:
            self._waiting.append(request)
        elif not self._writer.is_closing():
            self._writer.write(request)


def _copy_of(number: int) -> int:
    """Return a descriptor of this process's standard stream; of /dev/null if that is closed."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


class _Found:
    """The keeper of an earlier agent, which stands in for Popen. It is not this process's child, so
    its exit code may stay unknown."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    @classmethod
    def of(cls, pid: int) -> _Found | None:
        try:
            return cls(pid, os.pidfd_open(pid))
        except ProcessLookupError:
            return None

    def poll(self) -> int | None:
        """None while it lives, then 0: only its parent learns the exit code."""
        if self._descriptor < 0:
            return 0
        ready, _, _ = select.select([self._descriptor], [], [], 0)
        return 0 if ready else None

    def forget(self) -> None:
        """Close the pidfd; `poll` returns 0 from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_RECENT_S = 2.0
_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class OutOfMemory:
    """Whether the kernel has just killed a process of this cgroup because its memory was used up.

    Such a kill looks like any other SIGKILL. But the cgroup counts these kills, including those of
    its child cgroups: `memory.events` of cgroup v2, `memory.oom_control` of v1. Without a count it
    knows of no kill.
    """

    def __init__(self, own: Path = _OWN, root: Path = _CGROUPS) -> None:
        self._file = _counter(own, root)
        self._count = self._read()
        self._rose_at: float | None = None

    def look(self, now: float) -> None:
        """Read the count. Call it more often than every `_RECENT_S` seconds, or an old kill of
        another process looks like a recent one."""
        count = self._read()
        if count > self._count:
            self._rose_at = now
        self._count = count

    def has_killed(self, now: float) -> bool:
        """Whether the kernel killed a process in the last `_RECENT_S` seconds."""
        self.look(now)
        return self._rose_at is not None and now - self._rose_at < _RECENT_S

    def _read(self) -> int:
        if self._file is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            for line in self._file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _counter(own: Path, root: Path) -> Path | None:
    """The file with the count of the process's own cgroup; None if there is none.

    In a container the path in /proc may be the host's, while only the process's own is mounted."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found = _first(root, path, "memory.events") or _first(
                    root / "unified", path, "memory.events"
                )
            elif "memory" in controllers.split(","):
                found = _first(root / "memory", path, "memory.oom_control")
            else:
                continue
            if found is not None:
                return found
    return None


def _first(mount: Path, path: str, name: str) -> Path | None:
    return next((f for f in (mount / path.lstrip("/") / name, mount / name) if f.exists()), None)
