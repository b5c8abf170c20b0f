"""A backend for torch.distributed on CPUs that behaves like NCCL instead of gloo.

- An operation returns before it is done; it runs in its turn on the group's own thread.
- When a peer is lost nothing is raised: the operation hangs for ever.
- `abort()`, from any thread, ends hanging operations. Their callers get no error, but garbage.
- So do peers in the same operation, if it hangs: an aborted kernel goes through its remaining steps
  without data, and posts each of them (`postPeer` in NCCL's prims_simple.h, `storeLL` in
  prims_ll.h). A peer takes what lies in its buffers, and its operation ends as usual.
- An aborted group refuses further operations; `_abort_process_group` has unregistered it.
- A watchdog ends the process if an operation fails or takes longer than the group's time-out,
  unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0.
- Groups below the default one (`dist.new_group`) are of the same kind.

With NCCL the host cannot read a result before the device's queue has made it. Tensors here have no
queue, so `Work.wait()` blocks until the result or the garbage is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from elastic.core.membership import Generation
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import Backend

NAME = "nccl_manners"
BACKEND = Backend(name=NAME, device=torch.device("cpu"), queues=True, aborts=True)
ENDED_BY_WATCHDOG = 99
LAUNCH_S = 0.001
FED = -23456.0
"""What a peer takes for the data of an aborted member, in each floating-point number."""
_FED_LOOK_S = 0.002
_LOOK_S = 0.02

Tensors = list[torch.Tensor]


def use(*, news_late_s: float = 0.0) -> None:
    """Give a script's groups this backend. Call it before elastic.init().

    news_late_s: the longest that each announcement of a group takes to reach this worker.
    """
    register()
    Backend.register(lambda _slot: BACKEND)
    announce = Membership.announce

    def announce_late(membership: Membership, generation: Generation) -> None:
        time.sleep(random.uniform(0.2, 1.0) * news_late_s)
        announce(membership, generation)

    Membership.announce = announce_late  # type: ignore[method-assign]


def register() -> None:
    """Register the backend with torch.distributed. Skips the test with a torch that is too old."""
    if not hasattr(dist.ProcessGroup, "abort"):
        pytest.skip("torch 2.6 aborts NCCL's own groups alone")
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, MannersGroup, devices=["cpu"])


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """That of an operation. A communication hook may wait for it where another one has ended, on
    the group's own thread, which then goes on with the queue: with NCCL that wait is the device's.
    """

    def __init__(self, operation: Operation, run_next: Callable[[], bool]) -> None:
        super().__init__()
        self._operation, self._run_next = operation, run_next

    def wait(self) -> Any:
        while not self._operation.is_completed() and self._run_next():
            pass
        return super().wait()


class Operation(Work):
    """Queued; done with a result, or aborted with garbage, but never with an error."""

    def __init__(
        self,
        outputs: Tensors,
        start: Callable[[], tuple[Any, Tensors]],
        is_fed: Callable[[], bool],
        run_next: Callable[[], bool],
    ) -> None:
        """is_fed: whether an aborted peer has sent garbage in this operation. run_next: on the
        group's own thread, runs the next operation; returns whether it has."""
        super().__init__()
        self._is_fed = is_fed
        self.launched_at = time.monotonic()
        self.failed = False
        self._outputs = outputs
        self._start = start
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._future = _Future(self, run_next)

    def run(self) -> None:
        """Run on the group's thread. If a peer is lost the operation stays undone until `abort`."""
        time.sleep(LAUNCH_S)
        if self._done.is_set():
            return
        try:
            work, results = self._start()
            work.wait()
        except RuntimeError:
            self.failed = True
            while not self._done.wait(_FED_LOOK_S):
                if self._is_fed():
                    self.end(None, FED)
            return
        self.end(results)

    def end(self, results: Tensors | None, garbage: float = -12345.0) -> None:
        """Complete the operation. results: None if it was aborted or fed, which leaves garbage."""
        with self._lock, torch.no_grad():
            if self._done.is_set():
                return
            for number, output in enumerate(self._outputs):
                if results is None:
                    output.detach().fill_(garbage if output.is_floating_point() else 123)
                else:
                    output.detach().copy_(results[number])
            self._done.set()
        self._future.set_result(self._outputs)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[Tensors]:
        return self._future


class MannersGroup(dist.ProcessGroup):
    """Runs gloo's operations on copies, one after another, on a thread of its own."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self._store = store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo._set_sequence_number_for_group()
        # torch looks here for a device and for a time-out that can be set.
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self.launched = 0
        self._collectives = 0
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._pending: list[tuple[int, Operation]] = []
        """With their numbers, which are the same on all members; 0: between two members only."""
        self._lock = threading.Lock()
        self._aborted = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manners-queue", daemon=True)
        self._thread.start()
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0":
            threading.Thread(target=self._watch, name="manners-watchdog", daemon=True).start()

    # ---- operations

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        return self._in_place(tensors, lambda copies: self._gloo.allreduce(copies, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._in_place(tensors, lambda copies: self._gloo.allreduce_coalesced(copies, opts))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        return self._in_place(tensors, lambda copies: self._gloo.broadcast(copies, opts))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        return self._in_place(tensors, lambda copies: self._gloo.reduce(copies, opts))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.AllgatherOptions()
        sent = _copies(inputs)

        def start() -> tuple[Work, Tensors]:
            copies = [_copies(row) for row in outputs]
            return self._gloo.allgather(copies, sent, opts), [c for row in copies for c in row]

        return self._launch([o for row in outputs for o in row], start)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._launch([], lambda: (self._gloo.barrier(opts), []))

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        sent = _copies(tensors)
        return self._launch(
            [], lambda: (self._gloo.send(sent, destination, tag), []), between_two=True
        )

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        copies = _copies(tensors)
        return self._launch(
            tensors, lambda: (self._gloo.recv(copies, source, tag), copies), between_two=True
        )

    # ---- its end

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            pending, self._pending = self._pending, []
        for number, operation in pending:
            if not operation.is_completed():
                self._feed(number)
            operation.end(None)
        self._stop()

    def shutdown(self) -> None:
        with self._lock:
            pending = list(self._pending)
        for _, operation in pending:
            operation.wait()
        self._stop()

    def _stop(self) -> None:
        self._over.set()
        self._queue.put(None)

    # ---- what torch asks

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self.launched

    # ---- inside

    def _in_place(self, tensors: Tensors, start: Callable[[Tensors], Work]) -> Work:
        copies = _copies(tensors)
        return self._launch(tensors, lambda: (start(copies), copies))

    def _launch(
        self,
        outputs: Tensors,
        start: Callable[[], tuple[Any, Tensors]],
        *,
        between_two: bool = False,
    ) -> Work:
        with self._lock:
            if self._aborted:
                raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}")
            self.launched += 1
            self._collectives += not between_two
            number = 0 if between_two else self._collectives
            is_fed = functools.partial(self._is_fed, number)
            operation = Operation(list(outputs), start, is_fed, self._run_next)
            self._pending = [(n, o) for n, o in self._pending if not o.is_completed()]
            self._pending.append((number, operation))
            self._queue.put(operation)
        return operation

    def _feed(self, number: int) -> None:
        """Let peers that are in operation `number` take garbage."""
        if number == 0:
            return
        with contextlib.suppress(RuntimeError):  # the store's host has ended
            self._store.set(f"fed/{number}", "")

    def _is_fed(self, number: int) -> bool:
        try:
            return number > 0 and self._store.check([f"fed/{number}"])
        except RuntimeError:
            return False

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        if threading.current_thread() is not self._thread:
            return False
        operation = self._queue.get()
        if operation is None:
            self._queue.put(None)  # for who has called this one
            return False
        operation.run()
        return True

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            limit_s = self._gloo.options._timeout.total_seconds()
            now = time.monotonic()
            with self._lock:
                pending = [o for _, o in self._pending if not o.is_completed()]
            if any(o.failed or now - o.launched_at > limit_s for o in pending):
                print("manners: the watchdog takes the process down", file=sys.stderr, flush=True)
                os._exit(ENDED_BY_WATCHDOG)


def _copies(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [t.detach().clone() for t in tensors]
