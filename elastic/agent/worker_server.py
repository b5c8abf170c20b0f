"""Talks to this node's workers: the Unix socket at which they report and get commands, the watch
for silent workers, when their time figures are passed on, and the collection of their stacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic.core.diagnosis import doing, where_it_hangs
from elastic.core.membership import Failure, FailureKind
from elastic.rpc.framing import BadFrame, encode, read_message
from elastic.rpc.security import Report, log_report
from elastic.rpc.stacks import process_to_pb, stack_lines, whereabouts_from_pb
from elastic.runtime.off_loop import off_loop
from elastic.runtime.stack_file import (
    ALL_STACKS_SIGNAL,
    STACK_SIGNAL,
    descendants,
    parse_stacks,
    state_of,
    written_stacks,
)
from elastic.runtime.tasks import TaskSupervisor
from elastic.timeouts import timeout
from elastic.v1 import job_pb2, stacks_pb2
from elastic.v1 import local_pb2 as pb

_HELLO_TIMEOUT_S = 5.0
_MOST_HELLO_BYTES = 4096
_MOST_UNREAD_BYTES = 16 << 20  # by one worker: one so far behind does not follow any more


class WorkerServer:
    """Serves one connection for each worker, which its first message names.

    expected: whether a name is that of a worker spawned here; others are turned away.
    report: takes what the journal should know, as `Journal.record` does.
    on_error: takes what `on_message` raises, except ValueError, which means a bad message.
    known: set once the agent knows which workers an earlier agent left. Until then a worker that is
    not expected waits, for _HELLO_TIMEOUT_S at most.
    """

    def __init__(
        self,
        path: Path,
        *,
        expected: Callable[[str], bool],
        on_message: Callable[[str, pb.WorkerMessage], None],
        report: Report = log_report,
        on_error: Callable[[Exception], None] | None = None,
        known: asyncio.Event | None = None,
    ) -> None:
        self._path = path
        self._expected = expected
        self._on_message = on_message
        self._report = report
        self._on_error = on_error
        self._known = known
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._lasting: dict[str, Any] = {}
        # asyncio's own task for a connection is cancelled only when the loop ends, and Python 3.10
        # and 3.11 then log a traceback.
        self._connections = TaskSupervisor(_log_unhandled)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; only this user can connect."""
        self._server = await asyncio.start_unix_server(self._accept, sock=self._bind())

    async def listen_at(self, path: Path) -> None:
        """Listen at another path, since the socket was removed; connections stay open."""
        if self._server is not None:
            self._server.close()
        self._path = path
        await self.start()

    def _bind(self) -> socket.socket:
        self._path.unlink(missing_ok=True)  # an earlier agent left it
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # applies to the whole process: no await until it is restored
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        return listener

    def send(self, worker: str, **kind: Any) -> None:
        """Send `WorkerCommand(**kind)`; do nothing for a worker that is not connected."""
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(encode(pb.WorkerCommand(**kind)))
            unread = writer.transport.get_write_buffer_size()
            if unread > _MOST_UNREAD_BYTES:
                reason = f"worker {worker}: it does not read its messages; {unread} bytes wait"
                self._report("connection_refused", path=str(self._path), reason=reason)
                writer.transport.abort()  # it connects again, and gets everything again

    def broadcast(self, **kind: Any) -> None:
        for worker in list(self._writers):
            self.send(worker, **kind)

    def tell_all(self, **kind: Any) -> None:
        """Send it to every worker, and to each that connects later."""
        self._lasting |= kind
        self.broadcast(**kind)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        await self._connections.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.start(self._serve(reader, writer), "worker-connection")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = ""
        try:
            worker = await self._hello(reader)
            self._writers[worker] = writer
            for kind, message in self._lasting.items():
                self.send(worker, **{kind: message})
            while (message := await read_message(reader, pb.WorkerMessage)) is not None:
                self._deliver(worker, message)
        except BadFrame as error:
            who = f"worker {worker}" if worker else "an unknown peer"
            self._report("connection_refused", path=str(self._path), reason=f"{who}: {error}")
        except ConnectionError:
            return
        finally:
            if self._writers.get(worker) is writer:
                del self._writers[worker]
            writer.close()

    async def _hello(self, reader: asyncio.StreamReader) -> str:
        """Return the name of an expected worker; raises BadFrame."""
        try:
            async with timeout(_HELLO_TIMEOUT_S):
                first = await read_message(reader, pb.WorkerMessage, most_bytes=_MOST_HELLO_BYTES)
        except asyncio.TimeoutError:
            raise BadFrame(f"did not send its name within {_HELLO_TIMEOUT_S:g} s") from None
        if first is None:
            raise BadFrame("disconnected before it sent its name")
        worker = first.hello.worker
        if not self._expected(worker) and self._known is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(_HELLO_TIMEOUT_S):
                    await self._known.wait()
        if not self._expected(worker):
            raise BadFrame(f"claims to be {worker!r}, which this agent did not start")
        return worker

    def _deliver(self, worker: str, message: pb.WorkerMessage) -> None:
        try:
            self._on_message(worker, message)
        except ValueError as error:
            raise BadFrame(f"an invalid message: {error}") from error
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)


def _log_unhandled(error: BaseException) -> None:
    context = {"message": "an error ended a worker's connection", "exception": error}
    asyncio.get_running_loop().call_exception_handler(context)


STOPPED_AFTER_S = 1.5
_STOPPED = "Tt"
_LOOKS_WITHIN_S = 1.5  # looks are more frequent than this, unless the agent was stopped


@dataclass(slots=True)
class _Heard:
    pid: int
    at: float
    compiling: bool


class Liveness:
    """Finds workers that live but are silent. A healthy worker reports several times a second.

    silence_s: seconds after which a running process is given up. compiling_s: the same for one that
    compiled at its last report, since a compiler may hold the interpreter for long. 0 is no limit;
    silence_s of 0 is no limit for both. A process that the kernel calls stopped gets
    STOPPED_AFTER_S.

    A whole node can be stopped, as when a container is paused or Slurm suspends a job. So time in
    which `silent` was not called does not count as silence.
    """

    def __init__(self, silence_s: float, compiling_s: float) -> None:
        self._silence_s = silence_s
        self._compiling_s = compiling_s
        self._heard: dict[str, _Heard] = {}
        self._looked_at: float | None = None

    def heard(self, worker: str, pid: int, now: float, *, compiling: bool = False) -> None:
        """Note a message. compiling: the process runs torch.compile."""
        self._heard[worker] = _Heard(pid, now, compiling)

    def forget(self, worker: str) -> None:
        self._heard.pop(worker, None)

    def silent(self, now: float) -> list[tuple[str, float]]:
        """The workers to give up, with the seconds of their silence."""
        found = []
        away_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        for worker, heard in self._heard.items():
            if away_s > _LOOKS_WITHIN_S:
                heard.at = min(heard.at + away_s, now)
            age_s = now - heard.at
            if age_s < STOPPED_AFTER_S:
                continue
            too_long = 0.0 < self._silence_s <= age_s
            if heard.compiling and too_long:
                too_long = 0.0 < self._compiling_s <= age_s
            if too_long or state_of(heard.pid) in _STOPPED:
                found.append((worker, age_s))
        return found


EVERY_S = 10.0


@dataclass(slots=True)
class _Worker:
    newest: job_pb2.TimeSpent
    told_at: float
    told: bool
    pace: tuple[int, int] = (0, 0)
    """The generation and the step of the last sums that were passed on."""


class TimeReports:
    """Passes workers' time figures on: they are sums, so every EVERY_S and at the end is enough."""

    def __init__(
        self,
        send: Callable[[job_pb2.WorkerTime], None],
        send_pace: Callable[[job_pb2.WorkerPace], None] = lambda _: None,
    ) -> None:
        self._send, self._send_pace = send, send_pace
        self._workers: dict[str, _Worker] = {}

    def heard(self, worker: str, spent: job_pb2.TimeSpent, now: float, *, told: bool) -> None:
        """Note a worker's figures. told: the coordinator gets the message that they came in."""
        known = self._workers.setdefault(worker, _Worker(spent, now, told=False))
        known.newest = spent
        if told:
            known.told, known.told_at = True, now
        else:
            known.told = False
            if now - known.told_at >= EVERY_S:
                self.tell(worker, now)

    def heard_pace(self, worker: str, pace: job_pb2.Pace) -> None:
        """Pass a worker's sums on, each once; call it after `heard`. None may be left out, since
        ranks are compared at the same steps. Workers make new ones seldom enough."""
        known, newest = self._workers.get(worker), (pace.generation, pace.committed)
        if known is not None and newest != known.pace:
            known.pace = newest
            self._send_pace(job_pb2.WorkerPace(worker=worker, pace=pace))

    def tell(self, worker: str, now: float) -> None:
        """Pass the newest figures on, unless the coordinator has them."""
        known = self._workers.get(worker)
        if known is not None and not known.told and known.newest.generation:
            known.told, known.told_at = True, now
            self._send(job_pb2.WorkerTime(worker=worker, spent=known.newest))

    def forget(self, worker: str, now: float) -> None:
        self.tell(worker, now)
        self._workers.pop(worker, None)


_ANSWER_S = 0.4  # for a worker's link thread, which needs a millisecond if it can answer
_WRITE_S = 0.25  # for a process that was signalled
_MOST_CHILDREN = 16  # of one worker
T = TypeVar("T")


class StackCollector:
    """Collects the Python stacks of workers and of their children at one instant.

    Takes at most _ANSWER_S + _WRITE_S and a moment for the system's own answers. ask: sends a
    request to a worker. pids: the pids of running workers.
    """

    def __init__(
        self, ask: Callable[[str, stacks_pb2.StacksRequest], None], pids: Mapping[str, int]
    ) -> None:
        self._ask = ask
        self._pids = pids
        self._numbers = itertools.count(1)
        self._awaited: dict[tuple[str, int], asyncio.Future[stacks_pb2.WorkerStacks]] = {}
        self._signalling = asyncio.Lock()
        self._progress: dict[str, tuple[job_pb2.Progress, float]] = {}

    def progressed(self, worker: str, progress: job_pb2.Progress) -> None:
        """Note where a worker was last, for the case that it stops answering."""
        self._progress[worker] = progress, time.monotonic()

    def answered(self, worker: str, stacks: stacks_pb2.WorkerStacks) -> None:
        awaited = self._awaited.get((worker, stacks.request))
        if awaited is not None and not awaited.done():
            awaited.set_result(stacks)

    def forget(self, worker: str) -> None:
        self._progress.pop(worker, None)

    def collect(
        self,
        workers: Iterable[str],
        *,
        brief: bool = False,
        dying: bool = False,
        stretches: int = 0,
    ) -> asyncio.Task[list[stacks_pb2.WorkerStacks]]:
        """The stacks of these workers, in their order. brief: main threads only. dying: the workers
        are about to be killed, so that a signal may ask a silent one for all of its threads.
        stretches: if not 0, this many of the newest time stretches in place of stacks, only of
        workers that answer.

        The call itself asks the workers, so before they get any later message.
        """
        pids = {worker: self._pids.get(worker, 0) for worker in workers}
        stopped = {w for w, pid in pids.items() if state_of(pid) in _STOPPED}
        asked = [w for w, pid in pids.items() if pid and w not in stopped]
        request, loop = next(self._numbers), asyncio.get_running_loop()
        for worker in asked:
            self._awaited[worker, request] = loop.create_future()
            self._ask(
                worker, stacks_pb2.StacksRequest(request=request, brief=brief, stretches=stretches)
            )
        if stretches:
            return asyncio.ensure_future(self._answered(asked, request))
        return asyncio.ensure_future(self._collect(pids, stopped, asked, request, dying=dying))

    async def _collect(
        self,
        pids: Mapping[str, int],
        stopped: Collection[str],
        asked: Sequence[str],
        request: int,
        *,
        dying: bool,
    ) -> list[stacks_pb2.WorkerStacks]:
        answers, of_children = await asyncio.gather(
            self._answers(asked, request), self._in_turn(lambda: _stacks_of_children(pids))
        )
        silent = [w for w in asked if w not in answers]
        number = ALL_STACKS_SIGNAL if dying else STACK_SIGNAL
        written: dict[int, str] = {}
        if silent:
            of = [pids[w] for w in silent]
            written = await self._in_turn(lambda: written_stacks(of, _WRITE_S, number))
        found = []
        for worker, pid in pids.items():
            stacks = answers.get(worker) or self._last_known(worker, pid, written)
            if worker in stopped:
                stacks.answer = stacks_pb2.ANSWER_STOPPED
            stacks.processes.extend(of_children[worker])
            found.append(stacks)
        return found

    async def _answered(self, asked: Sequence[str], request: int) -> list[stacks_pb2.WorkerStacks]:
        return list((await self._answers(asked, request)).values())

    async def _answers(
        self, asked: Sequence[str], request: int
    ) -> dict[str, stacks_pb2.WorkerStacks]:
        awaited = {worker: self._awaited[worker, request] for worker in asked}
        try:
            if awaited:
                await asyncio.wait(awaited.values(), timeout=_ANSWER_S)
        finally:
            for worker in awaited:
                del self._awaited[worker, request]
        return {worker: f.result() for worker, f in awaited.items() if f.done()}

    async def _in_turn(self, look: Callable[[], T]) -> T:
        """Run one look at a time: each process has one file, truncated before it is signalled."""
        async with self._signalling:
            return await off_loop(look)

    def _last_known(
        self, worker: str, pid: int, written: Mapping[int, str]
    ) -> stacks_pb2.WorkerStacks:
        """For a worker that is silent: the stack that a signal brought, and its last place."""
        stacks = stacks_pb2.WorkerStacks(worker=worker, answer=stacks_pb2.ANSWER_NONE)
        threads = parse_stacks(written.get(pid, ""))
        if threads:
            stacks.answer = stacks_pb2.ANSWER_SIGNALLED
            stacks.processes.append(process_to_pb(pid, _name_of(pid), threads))
        progress, at = self._progress.get(worker, (None, 0.0))
        if progress is not None:
            stacks.place, stacks.committed = progress.place, progress.committed
            stacks.place_s = progress.place_s + time.monotonic() - at
            stacks.generation = progress.generation
        return stacks


def _stacks_of_children(workers: Mapping[str, int]) -> dict[str, list[stacks_pb2.ProcessStacks]]:
    children = {w: descendants(pid, _MOST_CHILDREN) if pid else [] for w, pid in workers.items()}
    written = written_stacks([c for these in children.values() for c in these], _WRITE_S)
    return {
        worker: [
            process_to_pb(child, _name_of(child), threads)
            for child in these
            if (threads := parse_stacks(written.get(child, "")))
        ]
        for worker, these in children.items()
    }


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return line.decode(errors="replace").strip()
    return ""


_MOST_LINES = 40


def with_place(failure: Failure, stacks: stacks_pb2.WorkerStacks) -> Failure:
    """The failure with the place at which the script hung, unless the coordinator has named it, and
    with a signature that is equal for all workers that hang there."""
    rank = whereabouts_from_pb(stacks, rank=0, node="")
    place, message = failure.place, failure.message
    if not place:
        frame = where_it_hangs(rank)
        place = frame.place if frame is not None else ""
        message = f"{message}: it {doing(rank)}"
    signature = failure.signature
    if place and failure.kind is FailureKind.LEFT_OUT:
        signature = f"hung at {place}"
    return dataclasses.replace(failure, message=message, place=place, signature=signature)


def main_stacks(stacks: stacks_pb2.WorkerStacks) -> str:
    """The stacks of the main threads, at most `_MOST_LINES` lines."""
    brief = stacks_pb2.WorkerStacks()
    brief.CopyFrom(stacks)
    for process in brief.processes:
        del process.threads[1:]
    lines = list(stack_lines(brief))
    return "\n".join(lines[:_MOST_LINES])
