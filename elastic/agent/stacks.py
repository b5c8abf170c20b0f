"""Collects the stacks of this node's workers, and of what they have forked, at one instant; and
what they say of where a worker hung that was looked at before it was ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from elastic.core.diagnosis import doing, where_it_hangs
from elastic.core.membership import Failure, FailureKind
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
from elastic.v1 import job_pb2
from elastic.v1 import stacks_pb2 as pb

_ANSWER_S = 0.4  # for a worker's link, which answers within a millisecond where it can
_WRITE_S = 0.25  # for a process that was signalled
_MOST_CHILDREN = 16  # of one worker
_STOPPED = "Tt"
T = TypeVar("T")


class StackCollector:
    """Never longer than _ANSWER_S + _WRITE_S, and a moment for the system's own answers.

    ask: sends a request to a worker. pids: those of the workers that run.
    """

    def __init__(
        self, ask: Callable[[str, pb.StacksRequest], None], pids: Mapping[str, int]
    ) -> None:
        self._ask = ask
        self._pids = pids
        self._numbers = itertools.count(1)
        self._awaited: dict[tuple[str, int], asyncio.Future[pb.WorkerStacks]] = {}
        self._signalling = asyncio.Lock()
        self._progress: dict[str, tuple[job_pb2.Progress, float]] = {}

    def progressed(self, worker: str, progress: job_pb2.Progress) -> None:
        """Where a worker was last: what is known of one that tells no more."""
        self._progress[worker] = progress, time.monotonic()

    def answered(self, worker: str, stacks: pb.WorkerStacks) -> None:
        """A worker has told its own."""
        awaited = self._awaited.get((worker, stacks.request))
        if awaited is not None and not awaited.done():
            awaited.set_result(stacks)

    def forget(self, worker: str) -> None:
        """It has ended."""
        self._progress.pop(worker, None)

    def collect(
        self,
        workers: Iterable[str],
        *,
        brief: bool = False,
        dying: bool = False,
        stretches: int = 0,
    ) -> asyncio.Task[list[pb.WorkerStacks]]:
        """Those of these workers, in their order. brief: only of main threads. dying: they are
        about to be killed, so that one that does not answer may be asked for all of its threads.
        stretches: no stacks, but so many of the newest stretches of time, of those that answer.

        Workers are asked as this is called: before they hear what is said to them next.
        """
        pids = {worker: self._pids.get(worker, 0) for worker in workers}
        stopped = {w for w, pid in pids.items() if state_of(pid) in _STOPPED}
        asked = [w for w, pid in pids.items() if pid and w not in stopped]
        request, loop = next(self._numbers), asyncio.get_running_loop()
        for worker in asked:
            self._awaited[worker, request] = loop.create_future()
            self._ask(worker, pb.StacksRequest(request=request, brief=brief, stretches=stretches))
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
    ) -> list[pb.WorkerStacks]:
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
                stacks.answer = pb.ANSWER_STOPPED
            stacks.processes.extend(of_children[worker])
            found.append(stacks)
        return found

    async def _answered(self, asked: Sequence[str], request: int) -> list[pb.WorkerStacks]:
        return list((await self._answers(asked, request)).values())

    async def _answers(self, asked: Sequence[str], request: int) -> dict[str, pb.WorkerStacks]:
        awaited = {worker: self._awaited[worker, request] for worker in asked}
        try:
            if awaited:
                await asyncio.wait(awaited.values(), timeout=_ANSWER_S)
        finally:
            for worker in awaited:
                del self._awaited[worker, request]
        return {worker: f.result() for worker, f in awaited.items() if f.done()}

    async def _in_turn(self, look: Callable[[], T]) -> T:
        """Each process has one file, which is cut before it is signalled."""
        async with self._signalling:
            return await off_loop(look)

    def _last_known(self, worker: str, pid: int, written: Mapping[int, str]) -> pb.WorkerStacks:
        """Of one that does not answer: what a signal has brought, and where it was last."""
        stacks = pb.WorkerStacks(worker=worker, answer=pb.ANSWER_NONE)
        threads = parse_stacks(written.get(pid, ""))
        if threads:
            stacks.answer = pb.ANSWER_SIGNALLED
            stacks.processes.append(process_to_pb(pid, _name_of(pid), threads))
        progress, at = self._progress.get(worker, (None, 0.0))
        if progress is not None:
            stacks.place, stacks.committed = progress.place, progress.committed
            stacks.place_s = progress.place_s + time.monotonic() - at
            stacks.generation = progress.generation
        return stacks


def _stacks_of_children(workers: Mapping[str, int]) -> dict[str, list[pb.ProcessStacks]]:
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


def with_place(failure: Failure, stacks: pb.WorkerStacks) -> Failure:
    """The same with the place at which the script hung, if the coordinator has not told it, and
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


def main_stacks(stacks: pb.WorkerStacks) -> str:
    """Those of the main threads, as lines of which not too many are."""
    brief = pb.WorkerStacks()
    brief.CopyFrom(stacks)
    for process in brief.processes:
        del process.threads[1:]
    lines = list(stack_lines(brief))
    return "\n".join(lines[:_MOST_LINES])
