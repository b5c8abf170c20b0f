"""Builds one generation's process group, and lets any thread abort it."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.torch_version import TorchVersion

from elastic.core.membership import Generation
from elastic.errors import ConfigurationError, GroupLost, TransientError
from elastic.runtime.network import listen_as
from elastic.worker.group.gloo_sockets import GroupSockets, gloo_made_by

T = TypeVar("T")
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
_BACKLOG = 2048  # torch's value: all members connect at once
_CALLBACKS_S = 60.0  # an aborted group's callbacks end at once, unless something blocks them
_LOOK_S = 0.01
_ONLY_OURS = 2  # references: the list's, and getrefcount's argument
_MEETING_TIMEOUT = datetime.timedelta(days=1)  # the coordinator gives up long before


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """How members reach each other: torch's name for it, its device, and its capabilities.

    Callers ask for a capability, not for the name or the type of the device.
    """

    name: str
    device: torch.device
    queues: bool = False
    """Operations run in the device's queue: they return before they are done, and an aborted one
    ends without an error and leaves garbage, here and at peers in the same operation. False: they
    return when done, or raise."""
    aborts: bool = False
    """torch can abort its groups while a thread is blocked in them. False: connections are shut
    down instead, which may leave a thread blocked."""

    @classmethod
    def for_slot(cls, slot: int) -> Backend:
        """Return the script's registered backend; else NCCL on the GPU with this local rank, or
        gloo on the host if there is no GPU. Sets variables for torch. Raises ConfigurationError."""
        backend = _choose(slot)
        if backend.aborts:
            turn_watchdog_off(os.environ)
        else:
            turn_flight_record_off(os.environ)
        return backend

    @staticmethod
    def register(choose: Callable[[int], Backend]) -> None:
        """Use other devices or transports than NCCL and gloo: `choose` returns the backend for a
        slot. Call this before elastic.init()."""
        global _choose
        _choose = choose

    @property
    def reforms_in_place(self) -> bool:
        """torch can give a group of this backend other members (torch >= 2.14: gloo and nccl2), so
        that objects built on it, such as DDP with its buckets, could be kept.

        `init_process_group(enable_reconfigure=True)`, then `_get_reconfigure_handle()` and
        `_reconfigure(uuid, handles)` of the group: a fresh uuid for each try, handles in the order
        of ranks, no collective before the first call. A blocked member still has to be freed.
        """
        known = inspect.signature(dist.init_process_group).parameters
        return "enable_reconfigure" in known and self.name in ("gloo", "nccl2")

    def wait_for_device(self) -> None:
        """Return when all that the calling thread has queued so far is done, or was aborted.

        `Group.check` says whether it was aborted. Costs nothing without a queue.
        """
        if not self.queues:
            return
        done = torch.get_device_module(self.device).Event()
        done.record()
        done.synchronize()


def _nccl_or_gloo(slot: int) -> Backend:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return Backend(name="gloo", device=torch.device("cpu"))
    devices = torch.cuda.device_count()
    if slot >= devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigurationError(
            f"slot {slot} of this node has no GPU of its own: the node has {devices} "
            f"{'' if visible is None else f'(CUDA_VISIBLE_DEVICES={visible}) '}"
            "and NCCL refuses two ranks on one GPU; start at most "
            f"{devices} workers here (--nproc-per-node {devices}, or gpu)"
        )
    device = torch.device("cuda", slot)
    torch.cuda.set_device(device)
    return Backend(name="nccl", device=device, queues=True, aborts=True)


_choose: Callable[[int], Backend] = _nccl_or_gloo

_LIBUV_LISTENS = TorchVersion(torch.__version__) >= "2.13"
"""torch 2.6 refuses a listener with this kind of store. Versions between are not tested."""
_set_timeout: Callable[[datetime.timedelta], None] = getattr(
    dist, "set_timeout", dist.distributed_c10d._set_pg_timeout
)
"""Sets the default group's time-out; torch has a public name for it from 2.14 on."""
_TAKES_TIMEOUT_LATER = torch.__version__ >= "2.13"
"""gloo's collectives obey a time-out that is set later; those of torch 2.6 do not."""
_undropped: list[list[Any]] = []
GROUPS = dist.distributed_c10d._world.pg_map
"""torch's own record of this process's groups."""


class StoreHost:
    """The TCPStore that this worker hosts for every generation in which it has rank 0."""

    def __init__(self, host: str, ports: tuple[int, int] = (0, 0)) -> None:
        """It listens at `host` if that is an address of this machine, else at all of its addresses.

        `ports`: the first and the last port at which it may listen; 0: any.

        Raises TransientError if none is free, or if the system refuses something else that is
        needed.
        """
        listener = _listener(host, ports)
        listener.setblocking(True)  # as torch needs it, whatever the script's default is
        port = listener.getsockname()[1]
        try:
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=False,
                master_listen_fd=listener.detach(),  # torch owns it from here on
                use_libuv=_LIBUV_LISTENS,
            )
        except dist.DistError as error:  # torch does not say why the system refused it
            raise TransientError(
                f"torch cannot host the group's store at {host}: {first_line(error)}; it needs "
                "some descriptors, memory and a thread: see `ulimit -n` and `ulimit -u`, or try "
                "again"
            ) from error
        self.port: int = self._store.port
        self.endpoint = f"{host}:{self.port}"
        self._served: list[str] = []

    def serves(self, prefix: str) -> None:
        """A group has met here under this prefix: its members need no keys of the groups before.

        Removes those keys on another thread, because a worker may have rank 0 in thousands of
        groups. Does nothing if torch cannot list keys (before 2.13).
        """
        past, self._served = self._served, [prefix]
        if past and hasattr(self._store, "list_keys"):
            threading.Thread(
                target=self._forget, args=(past,), name="elastic-store-sweep", daemon=True
            ).start()

    def _forget(self, prefixes: list[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the process is ending
            for key in self._store.list_keys():
                if key.startswith(tuple(f"{prefix}/" for prefix in prefixes)):
                    self._store.delete_key(key)


def _listener(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listen at a free one of the ports. A node's workers start at different ports."""
    first, last = ports
    count = last - first + 1
    for port in (first and first + (os.getpid() + at) % count for at in range(count)):
        with contextlib.suppress(OSError):
            return listen_as(host, port, backlog=_BACKLOG)
    raise TransientError(
        f"none of the ports {first}-{last} is free here for the group's store; widen "
        "--worker-port-range, or end what else uses them"
    )


class Group:
    """A process group that any thread may abort while another is blocked in it.

    A group is lost as soon as it is frozen: no result counts that is not known by then. Where
    operations queue, members abort their groups only when all of them are frozen.
    """

    def __init__(self, generation: Generation, rank: int, backend: Backend) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = generation.world_size
        self.backend = backend
        self._ending = threading.Lock()  # one thread at a time ends it, none once it is closed
        self._closed = False
        self._torch: dist.ProcessGroup | None = None
        self._uncounted = 0
        self._sockets = GroupSockets()
        self.store: Store | None = None
        """The store at which the members met, under the generation's own prefix."""
        self._hook_before = sys.excepthook
        self._hook: Callable[..., Any] | None = None
        self.met_at = ""
        """This member's key in the store for the newest call."""
        self._lost = threading.Event()
        self._wake = threading.Event()  # connected, or aborted

    @property
    def lost(self) -> bool:
        """It was frozen, or aborted."""
        return self._lost.is_set()

    def build(self, host: StoreHost, timeout_s: float) -> None:
        """Form the group with the other members. Raises GroupLost if that fails or is aborted.

        timeout_s: for connecting, once all members are there. Until then a member may evaluate as
        long as the coordinator lets it. If it never comes, a newer generation aborts this group.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        self._sockets.begin(own_store_port=host.port)
        self.check()
        try:
            self._connect(self._meet(timeout), timeout)
        except (RuntimeError, ValueError) as error:
            with self._ending:
                self._discard()
            raise GroupLost(f"the group did not assemble: {first_line(error)}") from error
        self.check()
        if self.rank == 0:
            host.serves(self.generation.store_prefix)

    def check(self) -> None:
        """Raise GroupLost if the group was frozen or aborted."""
        if self.lost:
            raise GroupLost(f"generation {self.generation.number} was superseded")

    def settle(self) -> None:
        """Return when all that this thread has queued is done and its results may be read.

        Raises GroupLost if the group was frozen or aborted, since the results may be garbage: a
        result counts only if the group is not frozen when it is there. Call this before concluding
        anything from received data.
        """
        if self.backend.queues:
            self.backend.wait_for_device()
        if self._lost.is_set():
            self.check()

    @property
    def counts_collectives(self) -> bool:
        """True while torch has counted them whenever it was asked."""
        return self._uncounted == 0

    def collectives(self) -> int:
        """Return how many collectives this group and the script's groups below it have launched.

        If torch does not count them, each call returns one more, as if there had been one between.
        """
        group = self._torch  # read once: the reporting thread asks, too
        if group is None:
            return 0
        try:
            if len(GROUPS) < 2:
                return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
            known: list[Any] = list(GROUPS)
            return sum([1 + int(each._get_sequence_number_for_group()) for each in known])
        except RuntimeError:
            self._uncounted += 1
            return self._uncounted

    def collectives_counter(self) -> Callable[[], int] | None:
        """Return a function that returns how many collectives this group has begun, without the
        script's groups below it, which may have other members. It refers to torch's group, which
        cannot be discarded meanwhile. None if torch does not count them, or the group is closed.
        """
        count: Callable[[], int] | None
        count = getattr(self._torch, "_get_sequence_number_for_group", None)
        try:
            if count is not None:
                count()
        except RuntimeError:
            return None
        return count

    def freeze(self) -> None:
        """Let no further result count. Any thread may call this; blocked threads stay blocked."""
        self._lost.set()

    def abort(self) -> None:
        """Free every thread that is blocked in this group's collectives. Any thread may call this.

        Touches nothing but this group, however late the call. A second thread waits for the first.
        """
        self.freeze()
        self._wake.set()
        with self._ending:
            if self._closed:
                return
            if self.backend.aborts and self._is_default():
                self._abort_all()
            self._sockets.cut()

    def leave(self) -> None:
        """Stop sending, but let peers read what was sent: for a member whose part is done."""
        if not self.backend.aborts:
            self._sockets.cut(socket.SHUT_WR)

    def close(self) -> None:
        """Discard the group; a new one may follow."""
        if not self.lost:
            self.leave()
        with self._ending:
            self._closed = True
            self._discard()

    def is_cut(self) -> bool:
        """Whether a connection of the group is down: this process or the other end has closed it.

        gloo closes its connections when one of them fails and when a collective times out. Of a
        group that torch can abort (NCCL) only those with the store count, because the others may
        end with what they were opened for.
        """
        store = self.generation.store_port if self.backend.aborts else None
        return self._sockets.are_cut(only_to_port=store)

    def descriptors(self) -> list[int]:
        """Return the group's sockets, for forked children to close. gloo may have closed some since
        the group was lost, and then their numbers are those of others, such as a loader's pipes."""
        return self._sockets.descriptors()

    def _unless_aborted(self, make: Callable[[], T]) -> T:
        """Return what `make` returns. Its thread is abandoned when the group is aborted."""
        made: list[T] = []
        failed: list[Exception] = []
        self._wake.clear()
        self.check()

        def run() -> None:
            try:
                made.append(make())
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
            self._wake.set()

        threading.Thread(target=run, name="elastic-connect", daemon=True).start()
        self._wake.wait()
        self.check()
        if failed:
            raise failed[0]
        return made[0]

    def _meet(self, timeout: datetime.timedelta) -> Store:
        """Wait at the store until every member is there.

        If the host has died, C++ tries to connect again and again, and nothing can stop it.
        """
        host, _, port = self.generation.store_endpoint.rpartition(":")
        client = self._unless_aborted(
            lambda: TCPStore(host, int(port), is_master=False, timeout=timeout)
        )
        store = PrefixStore(self.generation.store_prefix, client)
        # No counter: whoever can reach the port could add to it, and nobody would be complete.
        if self.rank > 0:
            store.set(f"here/{self.rank}", "")
            store.wait(["all"], _MEETING_TIMEOUT)
        else:
            store.wait([f"here/{rank}" for rank in range(1, self.world_size)], _MEETING_TIMEOUT)
            store.set("all", "")
        self.store = store
        return store

    def _connect(self, store: Store, timeout: datetime.timedelta) -> None:
        # torch puts its count of groups into the store's keys. A group that did not form, or formed
        # only here, must not leave this member's count different from its peers'.
        dist.distributed_c10d._world.group_count = 0
        self._hook_before = sys.excepthook
        try:
            with gloo_made_by(self._unless_aborted):
                dist.init_process_group(
                    self.backend.name,
                    store=store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timeout if _TAKES_TIMEOUT_LATER else COLLECTIVE_TIMEOUT,
                )
        finally:
            with self._ending:
                self._torch = dist.group.WORLD
                self._hook = sys.excepthook
        self.check()  # an earlier abort found nothing to abort
        if self.backend.queues:
            self._connect_queue()
        self._sockets.built(self._ports(store))
        _set_timeout(COLLECTIVE_TIMEOUT)

    def _connect_queue(self) -> None:
        """Run a first collective, in which NCCL connects, while the time of joining is measured."""
        dist.all_reduce(torch.zeros(1, device=self.backend.device))
        self.settle()

    def _ports(self, store: Store) -> set[int]:
        """Return the ports at which the members' gloo and their store listen."""
        mine = ",".join(map(str, sorted(self._sockets.ports())))
        store.set(f"listens/{self.rank}", mine)
        keys = [f"listens/{rank}" for rank in range(self.world_size)]
        found = {int(port) for ports in store.multi_get(keys) for port in ports.split(b",") if port}
        return found | {self.generation.store_port}

    def _is_default(self) -> bool:
        """True if torch's default group, and so all that the script made below it, is this one."""
        return self._torch is not None and dist.group.WORLD is self._torch

    def _discard(self) -> None:
        last = [self._torch, *self._backends()]
        if self._is_default():
            if self.backend.aborts:
                self._abort_all()
            else:
                dist.destroy_process_group()
            self._unhook()
        self._torch = None
        if last[0] is not None and (self.lost or self.backend.aborts):
            # Dropping the last reference waits for its threads: see worker/group/stuck.py.
            threading.Thread(
                target=_drop_last_reference, args=(last,), name="elastic-discard", daemon=True
            ).start()
        else:
            _drop(last)

    def _backends(self) -> list[Any]:
        """Return the backends of this group and of those that the script has made below it."""
        groups: set[Any] = {self._torch, *(GROUPS if self._is_default() else ())} - {None}
        return [each._get_backend(device) for each in groups for device in each._device_types]

    def _abort_all(self) -> None:
        """Abort this group and those below it, which torch 2.6 does only if given the group."""
        dist.distributed_c10d._abort_process_group(dist.group.WORLD)

    def _unhook(self) -> None:
        """Restore sys.excepthook. With every group, torch chains a hook to the one before: after a
        thousand groups an exception would end in a RecursionError."""
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._hook_before


def _drop_last_reference(last: list[Any]) -> None:
    """Drop the group, which comes first in the list, once nothing else in Python refers to it.

    A callback of a communication hook (PowerSGD's) runs on one of the group's own threads. If it
    had the last reference, that thread would destroy the group and wait there for itself to end:
    torch ends the process ("Resource deadlock avoided"). If something still refers to the group
    after _CALLBACKS_S, such as a variable of the script or uncollected garbage, this reference
    stays until another group is discarded.
    """
    held = [_undropped.pop() for _ in range(len(_undropped))]
    _undropped.extend(other for other in held if not _drop(other, only_if_ours=True))
    until = time.monotonic() + _CALLBACKS_S
    while not _drop(last, only_if_ours=True):
        if time.monotonic() > until:
            _undropped.append(last)
            return
        time.sleep(_LOOK_S)


def _drop(last: list[Any], *, only_if_ours: bool = False) -> bool:
    """Drop the group, then its backends: their threads may need the GIL to end, for example to free
    tensors. A backend that ends releases it; a group of torch < 2.8, if it came last, would not.
    Returns False if `only_if_ours` and there are other references."""
    if only_if_ours and sys.getrefcount(last[0]) > _ONLY_OURS:
        return False
    while last:
        del last[0]
    return True


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 300 characters."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


# ProcessGroupNCCL reads these when it is built (torch 2.13). The watchdog would end the whole
# process when a peer dies. Its monitor would do so 8 minutes after any error. Both would keep an
# aborted group, and the gradients in it, until the time for a flight record is over.
_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# If any of these is on, the survivors of a lost member end, too.
_REFUSED = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_DESYNC_DEBUG",
)
_OFF = ("0", "")


def turn_watchdog_off(environment: MutableMapping[str, str]) -> None:
    """Set variables that are unset; raise ConfigurationError for settings that would end survivors.

    Call this before the process builds its first group. Variables that are set stay as they are.
    """
    for name in _REFUSED:
        value = environment.get(name, "0")
        if value.strip() not in _OFF:
            raise ConfigurationError(
                f"{name}={value}: torch's watchdog would end every worker that waits for a lost "
                f"one, before the group can form again; unset it, or set it to 0"
            )
    for name, value in _OURS.items():
        environment.setdefault(name, value)


# torch reads these when it first records something (torch 2.13; the second is the older name).
_ENTRIES = "TORCH_FR_BUFFER_SIZE"
_NAMES = (_ENTRIES, "TORCH_NCCL_TRACE_BUFFER_SIZE")


def turn_flight_record_off(environment: MutableMapping[str, str]) -> None:
    """Turn torch's flight recorder off, unless the script's environment asks for it.

    Call this before the process builds its first group. The recorder takes each collective's stack,
    which costs a microsecond and 2.5 MiB, and never forgets a group: 256 bytes for each one that a
    worker has been in. Nothing reads the record: `elastic stacks` tells more about a hang.
    """
    if not any(name in environment for name in _NAMES):
        environment[_ENTRIES] = "0"
