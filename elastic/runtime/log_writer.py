"""Writes what workers print to their logs, in a process for which nothing waits.

A worker's standard output is a file in memory: printing waits for no disk and no process, and what
a worker printed last is there however it ended. The zygote makes these files. The agent reads the
newest output there, and the writer, a child of the zygote, copies it to the logs and frees the
memory. How far it has come is the position of the file, which it shares with the zygote. So another
writer goes on where one that was killed has stopped.

While a disk hangs or is full, the newest `KEPT_BYTES` of each worker wait in memory. What is older
is lost, and a line in the log says how much.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections import deque
from pathlib import Path

from elastic.runtime.file_names import shortened_name
from elastic.runtime.keeper import close_inherited
from elastic.runtime.leave_signals import STRAY_SIGNALS
from elastic.runtime.orphans import CLEANER_S, LOG_WRITER
from elastic.runtime.process_title import set_title

KEPT_BYTES = 4 << 20
"""The newest output of a worker, which always is in memory."""
LOG_BYTES = 64 << 20
"""The size of a log at which it is renamed, and the one before it removed. Output that a working
disk has not taken yet may have this size, too, so that a log always has the newest 64 MiB."""
OLDER = ".1"
"""What is added to the name of a log that has reached that size."""

_KEPT_LOGS = 100  # of workers that have ended, the newest ones
_KEPT_OUTPUTS = 8  # of these, for an agent that hears late of a worker's start
_PIECE_BYTES = 1 << 20
_LOOK_S = 0.2  # a script that only prints fills less than LOG_BYTES meanwhile
_LAST_LOOK_S = 0.005  # when all others have ended
_STALLED_S = 1.0  # for a disk that works; while it does, the wait is not limited to KEPT_BYTES
_SILENT_S = 5.0  # until the operator is told
_EARLY_S, _MOST_EARLY_ENDS = 1.0, 3
_LEFT_BEHIND_S = 10.0  # after a worker's end, for the processes that it has left behind
_MESSAGE_BYTES = 1 << 16
_NAME_LENGTH = 200  # of 249
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def output_name(worker: str) -> str:
    """Return the name of the file in memory."""
    return shortened_name(f"elastic-output-{worker}", _NAME_LENGTH)


def open_output(worker: str, path: str) -> int:
    """Open a worker's output, a descriptor of the zygote in /proc. Raises OSError, also if the
    zygote has closed it and uses the number for something else now."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{output_name(worker)} (deleted)":
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return descriptor


class LogWriter:
    """The zygote's side: makes the workers' outputs, and starts the writer again if it is killed.

    `control` becomes readable when the writer has something to tell, which `heard` returns.
    """

    def __init__(self) -> None:
        self.control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self._pid, self._started_at, self._early_ends = 0, 0.0, 0
        self._outputs: dict[str, tuple[bytes, int]] = {}  # (message, descriptor) by worker
        self._ended: deque[str] = deque()

    def new_output(self, worker: str) -> tuple[int, int]:
        """Make the output of a worker that is about to be forked. Return a descriptor for `write`
        and one at which the worker appends. Raises OSError."""
        if not self._pid:
            self._start()
        output = os.memfd_create(output_name(worker), os.MFD_CLOEXEC)
        try:  # opened again, because appending must not move the position of the first one
            path = f"/proc/self/fd/{output}"
            return output, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            os.close(output)
            raise

    def write(self, worker: str, pid: int, log_path: str, output: int) -> None:
        """Write the output of this worker to this log from now on."""
        self._outputs[worker] = json.dumps([worker, pid, log_path]).encode(), output
        self._tell(*self._outputs[worker])

    def worker_ended(self, worker: str) -> None:
        self._ended.append(worker)
        if len(self._ended) > _KEPT_OUTPUTS:
            os.close(self._outputs.pop(self._ended.popleft())[1])

    def child_ended(self, pid: int) -> None:
        """Start another writer if it was this child of the zygote that has ended."""
        if pid == self._pid:
            self._pid = 0
            lived_s = time.monotonic() - self._started_at
            self._early_ends = self._early_ends + 1 if lived_s < _EARLY_S else 0
            if self._early_ends < _MOST_EARLY_ENDS:  # else the next worker's start tries
                with contextlib.suppress(OSError):
                    self._start()

    def heard(self) -> tuple[str, str] | None:
        """Return a worker whose log cannot be written, and the reason."""
        with contextlib.suppress(BlockingIOError):
            worker, reason = json.loads(self.control.recv(_MESSAGE_BYTES))
            return worker, reason
        return None

    def close(self) -> None:
        """Let the writer end once it has written what the workers have left, and close all that
        this process has of it. A forked worker, too, calls this."""
        self.control.close()
        self._theirs.close()
        for _, output in self._outputs.values():
            os.close(output)
        self._outputs.clear()

    def _start(self) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                _become_writer(self._theirs)
            except BaseException:  # noqa: BLE001 - this process must not become another zygote
                traceback.print_exc()
            os._exit(1)
        self._pid, self._started_at = pid, time.monotonic()
        for message, output in self._outputs.values():
            self._tell(message, output)

    def _tell(self, message: bytes, output: int) -> None:
        with contextlib.suppress(OSError):  # it has been stopped for long: its successor hears it
            socket.send_fds(self.control, [message], [output])


def _become_writer(control: socket.socket) -> None:
    signal.set_wakeup_fd(-1)
    for number in STRAY_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # whoever kills the zygote's group does not mean the logs
    set_title(LOG_WRITER)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the zygote's tells others that the run goes on
    close_inherited(control.fileno())
    _Writer(control).run()
    os._exit(0)  # a thread may wait for the disk


class _Log:
    """One worker's log. `look` is called on the main thread, `write` on the disk's thread."""

    def __init__(self, worker: str, path: str, output: int) -> None:
        self.worker = worker
        self.path = path
        self._output = output
        self.ended_at: float | None = None
        self.waits = False
        self._seen, self._moved_at = -1, 0.0
        self._floor = _freed_up_to(output)  # what is below it is freed or about to be
        self._lost = 0
        self._error = ""
        self._is_made = False
        self.told = False

    # ---- on the main thread

    def look(self, now: float, kept_bytes: int = KEPT_BYTES) -> str:
        """Free memory; return why the log cannot be written, or an empty string. kept_bytes: of
        what waits for a disk that hangs."""
        size, position = os.fstat(self._output).st_size, os.lseek(self._output, 0, os.SEEK_CUR)
        if size < position:  # the script has opened /dev/stdout anew
            position = self._floor = 0
            os.lseek(self._output, 0, os.SEEK_SET)
        self.waits = size > position
        if position != self._seen or not self.waits:
            self._seen, self._moved_at = position, now
        still_s = now - self._moved_at
        most = kept_bytes if still_s > _STALLED_S else LOG_BYTES
        floor = max(min(position, size - KEPT_BYTES), size - most)
        if floor < size:
            floor -= floor % mmap.PAGESIZE  # a part of a page is not freed, but is read as zeros
        self._free(floor)
        if not self.waits:
            return ""
        return self._error or ("its disk does not answer" if still_s > _SILENT_S else "")

    def _free(self, floor: int) -> None:
        if floor - self._floor >= _PIECE_BYTES:
            before, self._floor = self._floor, floor  # first: `write` must not take the hole
            _libc.fallocate(self._output, _KEEP_SIZE | _PUNCH_HOLE, before, floor - before)

    # ---- on the disk's thread

    def write(self) -> bool:
        """Write a piece; return whether there may be more to write now."""
        position = os.lseek(self._output, 0, os.SEEK_CUR)
        data = os.pread(self._output, _PIECE_BYTES, position)
        floor = self._floor
        if position < floor:
            self._lost += floor - position
            os.lseek(self._output, floor, os.SEEK_SET)
            return True
        if not data and self._is_made:
            return False
        if len(data) == _PIECE_BYTES:
            data = data[: data.rfind(b"\n") + 1] or data  # so that logs begin with a whole line
        try:
            written = self._append(data)
        except OSError as error:
            self._error = error.strerror or str(error)
            return False
        self._error, self._is_made = "", True  # also the log of a worker that prints nothing
        os.lseek(self._output, position + written, os.SEEK_SET)
        return True

    def _append(self, data: bytes) -> int:
        """Append to the log, and return how many bytes it took. The log is opened each time: it may
        have been removed or renamed, and on NFS others see what was written to a closed file."""
        log = _open(self.path)
        try:
            size = os.fstat(log).st_size
            if size and size + len(data) > LOG_BYTES:
                os.replace(self.path, self.path + OLDER)
                full, log = log, _open(self.path)
                os.close(full)
            if self._lost:
                os.write(log, b"\n[elastic: %d bytes of output are lost here]\n" % self._lost)
                self._lost = 0
            return os.write(log, data)
        finally:
            os.close(log)

    def close(self) -> None:
        os.close(self._output)


def _freed_up_to(output: int) -> int:
    """Where the output goes on if an earlier writer has freed what comes next in it, which would be
    read as zeros; else 0."""
    position = os.lseek(output, 0, os.SEEK_CUR)
    again = os.open(f"/proc/self/fd/{output}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.lseek(again, position, os.SEEK_DATA)
    except OSError:  # all is written
        return 0
    finally:
        os.close(again)
    return found if found > position else 0


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:  # somebody has removed the directory
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o600)


class _Writer:
    """Hears of outputs on the main thread, and writes on another one, which may hang."""

    def __init__(self, control: socket.socket) -> None:
        self._control: socket.socket | None = control
        self._logs: dict[str, _Log] = {}  # by worker
        self._ends_by = math.inf
        self._living = select.poll()
        self._living.register(control, select.POLLIN)
        self._workers: dict[int, str] = {}  # that live, by pidfd
        self._work = threading.Event()
        self._finished: deque[_Log] = deque()

    def run(self) -> None:
        """Return when the zygote has closed its end, its workers are gone and all is written, or
        `CLEANER_S` after the first of these."""
        threading.Thread(target=self._write_all, name="elastic-disk", daemon=True).start()
        while self._control is not None or (self._logs and time.monotonic() < self._ends_by):
            pause_s = _LOOK_S if self._control is not None else _LAST_LOOK_S
            for descriptor, _ in self._living.poll(1000 * pause_s):
                if descriptor in self._workers:
                    self._note_end(descriptor)
                else:
                    self._hear()
            self._look()

    def _hear(self) -> None:
        assert self._control is not None
        message, outputs, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        if not message:
            self._living.unregister(self._control)
            self._control = None
            self._ends_by = time.monotonic() + CLEANER_S
            return
        worker, pid, path = json.loads(message)
        if worker in self._logs:  # an earlier writer did not read the message
            os.close(outputs[0])
            return
        log = self._logs[worker] = _Log(worker, path, outputs[0])
        self._work.set()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            log.ended_at = time.monotonic()
        else:
            self._workers[pidfd] = worker
            self._living.register(pidfd, select.POLLIN)

    def _note_end(self, pidfd: int) -> None:
        self._living.unregister(pidfd)
        self._logs[self._workers.pop(pidfd)].ended_at = time.monotonic()
        os.close(pidfd)

    def _look(self) -> None:
        now = time.monotonic()
        ended = sum(log.ended_at is not None for log in self._logs.values())
        for log in list(self._logs.values()):
            surplus = log.ended_at is not None and ended > _KEPT_OUTPUTS
            ended -= log.ended_at is not None
            reason = log.look(now, 0 if surplus else KEPT_BYTES)
            if reason and not log.told and self._control is not None:
                log.told = True
                with contextlib.suppress(OSError):  # nobody listens
                    told = json.dumps([log.worker, reason]).encode()
                    self._control.send(told, socket.MSG_DONTWAIT)
            if log.waits:
                self._work.set()
            elif log.ended_at is not None and (
                self._control is None or now - log.ended_at >= _LEFT_BEHIND_S
            ):
                self._finished.append(self._logs.pop(log.worker))
                self._work.set()

    # ---- on the disk's thread

    def _write_all(self) -> None:
        ended: deque[str] = deque()
        while True:
            self._work.wait()
            while sum(log.write() for log in list(self._logs.values())):
                pass
            self._work.clear()
            while self._finished:
                log = self._finished.popleft()
                log.close()
                ended.append(log.path)
            while len(ended) > _KEPT_LOGS:
                path = ended.popleft()
                for name in (path, path + OLDER):
                    with contextlib.suppress(OSError):
                        Path(name).unlink(missing_ok=True)
