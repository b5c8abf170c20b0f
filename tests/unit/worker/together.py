"""Runs functions in forked processes that form a gloo group, and raises their errors."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import json
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from typing import IO, Any

import torch
import torch.distributed as dist

from elastic.core.membership import ChangeReason, Generation, Member
from elastic.worker.group.process_group import Backend, Group, StoreHost

GLOO = Backend(name="gloo", device=torch.device("cpu"))
JOIN_TIMEOUT_S = 30.0  # machines may stand still for seconds
_DEADLINE_S = 60.0
Test = Callable[..., None]


class Seat:
    """One process's rank, its store host, and its exchange of values with the others."""

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.exchange = exchange
        """Returns what all processes gave, in the order of ranks, once all have: also a barrier."""
        self.host = StoreHost("127.0.0.1")
        self._endpoints: list[str] = exchange(self.host.endpoint)

    def generation(self, number: int = 1, **fields: Any) -> Generation:
        """Return a generation of all processes, in the order of their ranks."""
        members = tuple(
            Member(worker=f"w{rank}", node="n", slot=rank, endpoint=endpoint)
            for rank, endpoint in enumerate(self._endpoints)
        )
        known = {"incarnation": "i", "members": members, "reason": ChangeReason.STARTED}
        return Generation(number=number, **{**known, **fields})

    def join(self, number: int = 1, *, backend: Backend = GLOO) -> Group:
        """Form the group of all processes."""
        group = Group(self.generation(number), self.rank, backend)
        group.build(self.host, JOIN_TIMEOUT_S)
        return group


def run_together(*parts: Callable[[Seat], None]) -> None:
    """Run each part in a process of its own; raise AssertionError with a failed one's traceback.

    A part may end itself with SIGKILL: that is not an error.
    """
    pairs = [socket.socketpair() for _ in parts]
    pids = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads, Python 3.12
        for rank, part in enumerate(parts):
            pid = os.fork()
            if pid == 0:
                _be_child(rank, part, pairs)
            pids.append(pid)
    streams = []
    for ours, theirs in pairs:
        theirs.close()
        ours.settimeout(_DEADLINE_S)
        streams.append(ours.makefile("rw"))
    try:
        _serve(streams)
    except TimeoutError:
        _show_stacks(pids)
        raise
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for stream, (ours, _) in zip(streams, pairs, strict=True):
            stream.close()
            ours.close()


def in_processes(count: int) -> Callable[[Test], Test]:
    """Run the test in each of `count` processes; its first argument is the process's seat."""
    return run_by_each(count, run_together)


def run_by_each(count: int, run: Callable[..., None]) -> Callable[[Test], Test]:
    """`run` gives the test its first argument, and pytest all others."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def decorated(**fixtures: Any) -> None:
            run(*[functools.partial(test, **fixtures)] * count)

        signature = inspect.signature(test)
        _, *others = signature.parameters.values()
        decorated.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return decorated

    return decorate


def _serve(streams: list[IO[str]]) -> None:
    """Pass exchanged values on until every part has ended."""
    running = list(streams)
    while running:
        said: list[Any] = []
        for stream in list(running):
            line = stream.readline()
            message = json.loads(line) if line else {"done": True}
            if "error" in message:
                raise AssertionError(message["error"])
            if "done" in message:
                running.remove(stream)
            else:
                said.append(message["value"])
        for stream in running:
            stream.write(json.dumps(said) + "\n")
            stream.flush()


def _show_stacks(pids: list[int]) -> None:
    """Have processes that hang write the stacks of their threads to stderr, which pytest shows."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)  # for it to write them, and not into those of the next one


def _be_child(
    rank: int, part: Callable[[Seat], None], pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    gc.freeze()  # the parent's garbage, such as gRPC's, may need threads that are not here
    try:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        for other, (ours, theirs) in enumerate(pairs):
            ours.close()
            if other != rank:
                theirs.close()
        stream = pairs[rank][1].makefile("rw")
        message = _run(rank, part, stream)
        stream.write(json.dumps(message) + "\n")
        stream.flush()
        time.sleep(_DEADLINE_S)  # the parent ends it: its sockets must not close first
    finally:
        os._exit(1)


def _run(rank: int, part: Callable[[Seat], None], stream: IO[str]) -> dict[str, Any]:
    def exchange(value: Any) -> list[Any]:
        stream.write(json.dumps({"value": value}) + "\n")
        stream.flush()
        found: list[Any] = json.loads(stream.readline())
        return found

    try:
        torch.set_num_threads(1)
        part(Seat(rank, exchange))
    except BaseException:  # noqa: BLE001 - handed to the parent
        return {"error": f"rank {rank}:\n{traceback.format_exc()}"}
    return {"done": True}


def stay_away(seat: Seat) -> None:
    """Join the group, and take no part in its collectives."""
    seat.join()
    seat.exchange("freed")


def die() -> None:
    """End as a killed worker does."""
    os.kill(os.getpid(), signal.SIGKILL)


def meet() -> None:
    """Take part in an all-reduce of all members."""
    dist.all_reduce(torch.zeros(1))
