"""Groups form, break for all members at once, and their loss is distinguished from other errors."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from elastic.core.membership import ChangeReason, Generation, Member
from elastic.errors import ConfigurationError, GroupLost, TransientError
from elastic.worker.group import process_group
from elastic.worker.group.losses import is_group_loss
from elastic.worker.group.process_group import Backend, Group, first_line
from tests import nccl_manners
from tests.unit.worker import together
from tests.unit.worker.together import (
    GLOO,
    JOIN_TIMEOUT_S,
    Seat,
    die,
    in_processes,
    meet,
    run_together,
    stay_away,
)
from tests.waiting import eventually

ALONE = Generation(number=1, incarnation="i", members=(), reason=ChangeReason.STARTED)

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
BUFFER = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
# What torch has raised when a peer or its connection was gone. A script may raise the like.
OF_TRANSPORT = [
    RuntimeError(PAIR + "Connection closed by peer [127.0.0.1]:43210"),
    RuntimeError(PAIR + "Read error [127.0.0.1]:1234: Connection reset by peer"),
    RuntimeError(BUFFER + "Timed out waiting 1800000ms for recv operation to complete"),
    RuntimeError("Application timeout caused pair closure (gloo)"),
    RuntimeError("Broken pipe"),
    RuntimeError("read of shard 3: Connection reset by peer"),
    RuntimeError("Rank 1 failed to recv, got 0 bytes. Connection was likely closed: recvValue"),
    RuntimeError("NCCL Error 6: remote process exited or there was a network error"),
    RuntimeError(f"Caught ValueError in DataLoader worker process 0.\n{PAIR} Connection closed"),
    dist.DistNetworkError("The client socket has failed to connect to any network address"),
    dist.DistStoreError("wait timeout after 10000ms, keys: /i/1//0/1"),
]
# Errors of the script itself, alone or in a collective.
OF_TORCH = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("Expected to have finished reduction in the prior iteration"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed"),
    RuntimeError("ProcessGroupGloo::allgather: invalid output tensor list at index 0"),
]
OF_PYTHON = [
    ConnectionResetError("Connection reset by peer"),
    TimeoutError("socket timed out"),
    ValueError("gloo is a word"),
    ConfigurationError("choose another"),
]
OF_SCRIPTS = [*OF_TRANSPORT, *OF_TORCH, *OF_PYTHON]


def test_an_error_of_hosting_the_store_says_what_the_store_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistStoreError("Failed to init uv loop")

    monkeypatch.setattr(process_group, "TCPStore", refuse)
    with pytest.raises(TransientError, match=r"at h: Failed to init uv loop; it needs some descr"):
        process_group.StoreHost("h")


def test_the_store_listens_at_a_free_port_of_its_range() -> None:
    first = 30_000 + os.getpid() % 500 * 5  # below the ports that the kernel hands out
    last = first + 4
    hosts = [process_group.StoreHost("127.0.0.1", (first, last)) for _ in range(3)]
    ports = {host.port for host in hosts}
    assert len(ports) == 3
    assert all(first <= port <= last for port in ports)
    client = process_group.TCPStore("127.0.0.1", hosts[0].port, is_master=False)
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_a_port_range_without_a_free_port_is_refused() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        told = rf"none of the ports {port}-{port} is free here.*--worker-port-range"
        with pytest.raises(TransientError, match=told):
            process_group.StoreHost("127.0.0.1", (port, port))


def test_only_the_connections_of_the_group_decide_whether_an_error_shows_its_loss() -> None:
    """A script's storage may have lost a connection, and a traceback have gloo in a path."""

    def survive(seat: Seat) -> None:
        group = seat.join()
        meet()
        assert [e for e in OF_SCRIPTS if is_group_loss(e, group)] == []
        seat.exchange("looked")
        eventually(group.is_cut)
        assert [e for e in OF_SCRIPTS if not is_group_loss(e, group)] == OF_PYTHON

    def be_killed(seat: Seat) -> None:
        seat.join()
        meet()
        seat.exchange("looked")
        die()

    run_together(survive, be_killed)


def test_a_stopped_peer_is_a_loss_when_the_collective_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel keeps the connections open."""
    monkeypatch.setattr(process_group, "COLLECTIVE_TIMEOUT", datetime.timedelta(seconds=1))

    def wait(seat: Seat) -> None:
        group = seat.join()
        meet()
        _, stopped = seat.exchange(os.getpid())
        expect_loss(group)
        os.kill(stopped, signal.SIGKILL)

    def be_stopped(seat: Seat) -> None:
        seat.join()
        meet()
        seat.exchange(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    run_together(wait, be_stopped)


@pytest.mark.parametrize("how", ["killed", "late"])
def test_the_loss_of_a_group_of_the_scripts_counts(how: str) -> None:
    def wait(seat: Seat) -> None:
        group = seat.join()
        below = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        dist.all_reduce(torch.zeros(1), group=below)
        assert not is_group_loss(RuntimeError("Connection reset by peer"), group)
        seat.exchange("joined")
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.zeros(1), group=below)
        assert is_group_loss(caught.value, group)
        if how == "killed":
            eventually(group.is_cut, "the kernel closes one connection after another")
        else:
            assert not group.is_cut()
        seat.exchange("lost")

    def stay_away(seat: Seat) -> None:
        seat.join()
        below = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=below)
        seat.exchange("joined")
        if how == "killed":
            die()
        seat.exchange("lost")

    run_together(wait, stay_away)


def test_a_later_file_with_a_descriptor_of_the_group_does_not_pass_for_its_connection() -> None:
    """gloo has closed the connection, and the script has opened a file since."""

    def reuse(seat: Seat) -> None:
        group = seat.join()
        meet()
        descriptor = min(group.descriptors())
        one, other = socket.socketpair()
        os.dup2(one.fileno(), descriptor)
        assert group.is_cut()
        assert descriptor not in group.descriptors(), "a data loader's process would close it"
        seat.exchange("looked")
        del other

    run_together(reuse, stay_until("looked"))


def stay_until(said: str) -> Callable[[Seat], None]:
    def stay(seat: Seat) -> None:
        seat.join()
        meet()
        seat.exchange(said)

    return stay


@pytest.mark.parametrize("error", OF_SCRIPTS, ids=lambda e: str(e)[-30:])
def test_any_error_is_a_loss_once_the_group_was_aborted(error: Exception) -> None:
    group = Group(ALONE, 0, GLOO)
    group.abort()
    assert is_group_loss(error, group)


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(0)], ids=repr)
def test_interrupt_and_exit_are_no_loss_of_an_aborted_group(ending: BaseException) -> None:
    group = Group(ALONE, 0, GLOO)
    group.abort()
    assert not is_group_loss(ending, group)


def test_no_error_is_a_loss_without_a_group() -> None:
    assert not is_group_loss(dist.DistBackendError("NCCL communicator was aborted"), None)


def test_first_line_returns_an_errors_short_first_line_or_its_class_name() -> None:
    assert first_line(RuntimeError("\nwhat\nException raised from...")) == "what"
    assert first_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("x" * 1000))) == 300


def expect_loss(group: Group) -> None:
    """Assert that the present or next collective breaks as in a lost group, long before it times
    out."""
    began = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - judged below
        meet()
    assert is_group_loss(caught.value, group), repr(caught.value)
    assert time.monotonic() - began < JOIN_TIMEOUT_S / 3


def test_a_killed_peer_breaks_the_group() -> None:
    def survive(seat: Seat) -> None:
        group = seat.join()
        meet()
        seat.exchange("joined")
        expect_loss(group)

    def be_killed(seat: Seat) -> None:
        seat.join()
        meet()
        seat.exchange("joined")
        die()

    run_together(survive, be_killed)


def test_a_member_that_aborts_frees_the_others_and_all_join_the_next_group() -> None:
    """Otherwise members that have no connection to the lost one would wait forever."""

    def break_it(seat: Seat) -> None:
        group = seat.join(1)
        meet()
        group.abort()
        group.close()
        seat.join(2)
        meet()

    def be_freed(seat: Seat) -> None:
        group = seat.join(1)
        meet()
        expect_loss(group)
        group.abort()
        group.close()
        seat.join(2)
        meet()

    run_together(break_it, be_freed, be_freed)


def test_a_callback_that_outlives_its_group_does_not_end_the_process() -> None:
    """A communication hook's callback is one: it refers to the group on a thread of the group."""

    def lose(seat: Seat) -> None:
        group = seat.join()
        meet()
        entered, leave = threading.Event(), threading.Event()

        def hook(torch_group: Any) -> Any:
            def callback(_: Any) -> int:
                entered.set()
                leave.wait()
                return int(torch_group.rank())

            return callback

        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        seat.exchange("reduces")
        work.get_future().then(hook(dist.group.WORLD))
        del work
        seat.exchange("the other may")
        assert entered.wait(JOIN_TIMEOUT_S)
        group.abort()
        group.close()
        (discards,) = [t for t in threading.enumerate() if t.name == "elastic-discard"]
        leave.set()
        discards.join()
        assert len(seat.exchange("lives")) == 2

    def reduce_later(seat: Seat) -> None:
        seat.join()
        meet()
        seat.exchange("not yet")
        seat.exchange("now")
        dist.all_reduce(torch.ones(1))
        assert len(seat.exchange("lives")) == 2

    run_together(lose, reduce_later)


@pytest.mark.parametrize("made", ["its own", "a group of the script"])
@pytest.mark.parametrize("ends", ["aborted", "as planned"])
@in_processes(2)
def test_a_group_ends_while_its_threads_free_tensors(seat: Seat, ends: str, made: str) -> None:
    """The threads need the GIL for that. With torch 2.6 the end of a group waited for them and kept
    the GIL: the whole process stood still."""
    sys.setswitchinterval(1e-6)  # threads get the GIL often, but never for all tensors at once
    group = seat.join()
    torch_group = dist.group.WORLD if made == "its own" else dist.new_group()
    assert torch_group is not None
    meet()
    seat.exchange("joined")
    tensors = [torch.zeros(1) for _ in range(5000)]
    reduced = threading.Event()
    if ends == "as planned":
        future = torch_group.allreduce(tensors).get_future()
        future.then(lambda _: reduced.set())
        del future
    elif seat.rank == 0:  # rank 1 does not come
        torch_group.allreduce(tensors)
    del torch_group
    tensors.clear()
    if ends == "aborted":
        group.abort()
    else:
        assert reduced.wait(JOIN_TIMEOUT_S)
    group.close()
    for thread in threading.enumerate():
        if thread.name == "elastic-discard":
            thread.join()
    assert len(seat.exchange("lives")) == 2


def test_closing_a_group_that_was_never_built_starts_no_thread() -> None:
    group = Group(ALONE, 0, GLOO)
    group.abort()
    group.close()
    assert not [t for t in threading.enumerate() if t.name == "elastic-discard"]


def test_a_group_without_references_is_dropped_with_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Referred:
        """Stands in for torch's group."""

    monkeypatch.setattr(process_group, "_CALLBACKS_S", 0.0)
    monkeypatch.setattr(process_group, "_undropped", [])
    variable: Any = Referred()
    gone = weakref.ref(variable)
    first: Any = [variable]
    process_group._drop_last_reference(first)
    del variable, first
    assert gone() is not None
    another: Any = [Referred()]
    process_group._drop_last_reference(another)
    assert gone() is None


def test_an_abort_by_another_thread_frees_a_blocked_one() -> None:
    def block(seat: Seat) -> None:
        group = seat.join()
        timer = threading.Timer(0.1, group.abort)
        timer.start()
        expect_loss(group)
        assert group.lost
        with pytest.raises(GroupLost, match="superseded"):
            group.check()
        seat.exchange("freed")

    run_together(block, stay_away)


class Prefetcher:
    """A thread of the script that connects to a server of its own again and again."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._connect, daemon=True)
        self._thread.start()

    def broken(self) -> int:
        """Stop connecting; return how many of the connections do not work."""
        self._ends.set()
        self._thread.join()
        return len(self._pairs) - sum(map(_works, self._pairs))

    def made(self) -> int:
        return len(self._pairs)

    def _connect(self) -> None:
        while not self._ends.wait(0.0002):
            client = socket.create_connection(self._listener.getsockname())
            self._pairs.append((client, self._listener.accept()[0]))


def _works(pair: tuple[socket.socket, socket.socket]) -> bool:
    try:
        pair[0].sendall(b"x")
        return pair[1].recv(1) == b"x"
    except OSError:
        return False


def test_an_abort_does_not_cut_connections_that_the_script_makes_meanwhile() -> None:
    def block(seat: Seat) -> None:
        prefetcher = Prefetcher()
        group = Group(seat.generation(), seat.rank, GLOO)

        def let_the_other_come() -> None:
            during = prefetcher.made() + 10
            eventually(lambda: prefetcher.made() > during)
            seat.exchange("may come")

        threading.Thread(target=let_the_other_come, daemon=True).start()
        group.build(seat.host, JOIN_TIMEOUT_S)
        threading.Timer(0.1, group.abort).start()
        expect_loss(group)
        assert prefetcher.broken() == 0
        seat.exchange("freed")

    def come_late(seat: Seat) -> None:
        seat.exchange("may come")
        stay_away(seat)

    run_together(block, come_late)


def test_aborting_an_unfinished_build_does_not_cut_connections_of_the_script() -> None:
    def wait(seat: Seat) -> None:
        group = Group(seat.generation(), seat.rank, GLOO)
        prefetcher = Prefetcher()

        def abort() -> None:
            during = prefetcher.made() + 10
            eventually(lambda: prefetcher.made() > during)
            group.abort()

        threading.Thread(target=abort, daemon=True).start()
        with pytest.raises(GroupLost):
            group.build(seat.host, JOIN_TIMEOUT_S)
        assert prefetcher.made() > 10
        assert prefetcher.broken() == 0
        seat.exchange("gave up")

    def stay_away(seat: Seat) -> None:
        seat.exchange("gave up")

    run_together(wait, stay_away)


def test_data_sent_before_a_member_leaves_still_arrives() -> None:
    sent = torch.arange(2**20)

    def leave(seat: Seat) -> None:
        group = seat.join()
        dist.send(sent, 1)
        group.close()

    def read(seat: Seat) -> None:
        seat.join()
        received = torch.zeros_like(sent)
        dist.recv(received, 0)
        assert torch.equal(received, sent)

    run_together(leave, read)


@in_processes(1)
def test_errors_of_nccl_are_a_loss_and_those_of_other_connections_are_not(
    seat: Seat, manners: Backend
) -> None:
    group = seat.join(backend=manners)
    meet()
    assert is_group_loss(dist.DistBackendError("NCCL error in: NCCLUtils.cpp:93"), group)
    assert [e for e in OF_SCRIPTS if is_group_loss(e, group)] == []


def test_with_nccl_the_end_of_the_stores_host_is_a_loss(manners: Backend) -> None:
    def be_killed(seat: Seat) -> None:
        seat.join(backend=manners)
        seat.exchange("joined")
        die()

    def ask(seat: Seat) -> None:
        group = seat.join(backend=manners)
        seat.exchange("joined")
        eventually(group.is_cut)
        assert group.store is not None
        with pytest.raises(dist.DistNetworkError) as caught:
            group.store.get("key")
        assert is_group_loss(caught.value, group)

    run_together(be_killed, ask)


@in_processes(1)
def test_errors_of_the_script_in_a_real_group_are_not_taken_for_its_loss(seat: Seat) -> None:
    group = seat.join()
    for wrong in (
        lambda: dist.send(torch.zeros(1), 0),
        lambda: dist.all_gather([torch.zeros(1)] * 3, torch.zeros(1)),
    ):
        with pytest.raises(Exception, match=r"\w") as caught:
            wrong()
        assert not is_group_loss(caught.value, group), repr(caught.value)


def test_an_abort_ends_the_build_while_a_member_does_not_come() -> None:
    """The coordinator decides about a member that does not come, and not a timeout here."""

    def wait(seat: Seat) -> None:
        group = Group(seat.generation(), seat.rank, GLOO)
        threading.Timer(0.1, group.abort).start()
        began = time.monotonic()
        with pytest.raises(GroupLost):
            group.build(seat.host, JOIN_TIMEOUT_S)
        assert time.monotonic() - began < JOIN_TIMEOUT_S / 3
        seat.exchange("gave up")
        seat.join(2)
        meet()

    def come_late(seat: Seat) -> None:
        seat.exchange("gave up")
        seat.join(2)
        meet()

    run_together(wait, come_late)


def test_an_abort_ends_the_build_while_a_peer_that_has_met_does_not_connect() -> None:
    """The peer has no descriptor left: gloo waits for it until its timeout. A next group forms."""

    def wait(seat: Seat) -> None:
        group = Group(seat.generation(1), seat.rank, GLOO)
        aborted_at = math.inf

        def abort() -> None:
            nonlocal aborted_at
            seat.exchange("met")
            time.sleep(0.2)  # the build goes on into gloo; it must end wherever it is
            aborted_at = time.monotonic()
            group.abort()

        aborting = threading.Thread(target=abort)
        aborting.start()
        with pytest.raises(GroupLost):  # superseded, or the other one's abort came first
            group.build(seat.host, JOIN_TIMEOUT_S)
        aborting.join()
        assert time.monotonic() - aborted_at < JOIN_TIMEOUT_S / 3
        group.close()
        seat.exchange("free")
        seat.join(2)
        meet()

    def refuse(seat: Seat) -> None:
        group = Group(seat.generation(1), seat.rank, GLOO)
        group.store = group._meet(datetime.timedelta(seconds=JOIN_TIMEOUT_S))
        seat.exchange("met")
        seat.exchange("free")
        seat.join(2)
        meet()

    run_together(wait, wait, refuse)


def test_an_abort_ends_the_build_while_the_store_does_not_answer() -> None:
    """Rank 0's host may have died. Without an abort, connecting would take the whole time-out."""
    nobody = Member(worker="w0", node="n", slot=0, endpoint="127.0.0.1:1")
    myself = Member(worker="w1", node="n", slot=0, endpoint="127.0.0.1:2")
    generation = Generation(
        number=1, incarnation="i", members=(nobody, myself), reason=ChangeReason.STARTED
    )

    def connect(seat: Seat) -> None:
        group = Group(generation, 1, GLOO)
        threading.Timer(0.1, group.abort).start()
        began = time.monotonic()
        with pytest.raises(GroupLost, match="superseded"):
            group.build(seat.host, JOIN_TIMEOUT_S)
        assert time.monotonic() - began < JOIN_TIMEOUT_S / 3

    run_together(connect)


@in_processes(2)
def test_collectives_are_counted_also_those_of_the_scripts_own_group(seat: Seat) -> None:
    group = seat.join()
    before = group.collectives()
    for _ in range(3):
        meet()
    assert group.collectives() == before + 3
    below = dist.new_group([0, 1])
    before = group.collectives()
    dist.all_reduce(torch.zeros(1), group=below)
    meet()
    assert group.collectives() == before + 2


def test_the_count_of_collectives_grows_at_each_look_if_torch_does_not_count() -> None:
    class Uncounted:
        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError("ProcessGroup mpi does not yet support sequence numbers.")

    group: Any = Group(ALONE, 0, GLOO)
    group._torch = Uncounted()
    looks = [group.collectives() for _ in range(3)]
    assert looks == sorted(set(looks))


# ---- with a backend that behaves as NCCL does


@pytest.fixture
def manners(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl_manners.register()
    return nccl_manners.BACKEND


def test_an_abort_by_another_thread_ends_queued_operations_without_an_error(
    manners: Backend,
) -> None:
    def block(seat: Seat) -> None:
        group = seat.join(backend=manners)
        below = dist.new_group([0, 1])
        queued = [dist.all_reduce(torch.zeros(1), group=g, async_op=True) for g in (None, below)]
        link = threading.Timer(0.2, group.abort)
        link.start()
        for work in queued:
            work.wait()
        assert group.lost
        link.join()
        with pytest.raises(GroupLost):
            group.settle()
        with pytest.raises(ValueError, match="initialized") as caught:
            meet()
        assert is_group_loss(caught.value, group)
        seat.exchange("freed")

    def stay_away(seat: Seat) -> None:
        seat.join(backend=manners)
        dist.new_group([0, 1])
        seat.exchange("freed")

    run_together(block, stay_away)


@pytest.mark.parametrize("backend", [GLOO, nccl_manners.BACKEND], ids=lambda b: b.name)
@pytest.mark.usefixtures("manners")
@in_processes(2)
def test_a_late_abort_leaves_the_next_group_alone(seat: Seat, backend: Backend) -> None:
    first = seat.join(1, backend=backend)
    meet()
    first.close()
    second = seat.join(2, backend=backend)
    first.abort()
    meet()
    second.settle()


def test_two_threads_that_abort_at_once_abort_torchs_group_once(
    manners: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    torch_abort = dist.distributed_c10d._abort_process_group

    def slow_abort(*groups: dist.ProcessGroup) -> None:
        calls.append(threading.current_thread().name)
        time.sleep(0.2)
        torch_abort(*groups)

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", slow_abort)

    def abort_twice(seat: Seat) -> None:
        group = seat.join(backend=manners)
        link = threading.Thread(target=group.abort)
        link.start()
        eventually(lambda: calls)
        group.abort()
        group.close()
        assert not link.is_alive() or not dist.is_initialized()
        seat.join(2, backend=manners)
        link.join()
        dist.all_reduce(torch.zeros(1))
        assert len(calls) == 1

    run_together(abort_twice)


def test_an_abort_while_the_group_is_built_is_not_missed(
    manners: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch has built the group there is nothing to abort, and a lost peer never comes."""
    init = dist.init_process_group

    def be_aborted(seat: Seat) -> None:
        group = Group(seat.generation(), seat.rank, manners)

        def init_and_abort(*args: Any, **named: Any) -> None:
            init(*args, **named)
            group.abort()

        monkeypatch.setattr(dist, "init_process_group", init_and_abort)
        with pytest.raises(GroupLost):
            group.build(seat.host, 5.0)
        group.close()
        assert not dist.is_initialized()
        seat.exchange("lost")

    def never_come(seat: Seat) -> None:
        monkeypatch.setattr(Group, "_connect_queue", lambda _: None)
        with contextlib.suppress(GroupLost):  # if it still connects when the other aborts
            Group(seat.generation(), seat.rank, manners).build(seat.host, 1.0)
        seat.exchange("lost")

    run_together(be_aborted, never_come)


def test_a_late_abort_of_a_group_that_never_formed_leaves_the_next_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = dist.init_process_group

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no connection")

    def rejoin(seat: Seat) -> None:
        first = Group(seat.generation(1), seat.rank, GLOO)
        monkeypatch.setattr(dist, "init_process_group", refuse)
        with pytest.raises(GroupLost):
            first.build(seat.host, 5.0)
        first.close()
        monkeypatch.setattr(dist, "init_process_group", init)
        seat.join(2)
        first.abort()
        meet()

    run_together(rejoin, rejoin)


@in_processes(1)
def test_an_abort_leaves_a_group_that_replaced_the_aborted_one_alone(
    seat: Seat, manners: Backend
) -> None:
    first = seat.join(1, backend=manners)
    dist.destroy_process_group()
    second = seat.join(2, backend=manners)
    first.abort()
    meet()
    second.settle()


@pytest.mark.parametrize("backend", [GLOO, nccl_manners.BACKEND], ids=lambda b: b.name)
@pytest.mark.usefixtures("manners")
def test_a_collective_may_wait_longer_than_the_timeout_of_joining(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time-out of joining does not apply to the group's collectives: evaluations take long."""
    monkeypatch.setattr(together, "JOIN_TIMEOUT_S", 2.0)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")  # the watchdog would end the process

    def come_late(seat: Seat) -> None:
        group = seat.join(backend=backend)
        time.sleep(2.3)
        meet()
        group.settle()

    def wait(seat: Seat) -> None:
        group = seat.join(backend=backend)
        meet()
        group.settle()

    run_together(come_late, wait)


def test_a_watchdog_that_is_left_on_ends_the_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for NCCL has a watchdog: otherwise the tests that use it would prove nothing."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    nccl_manners.register()
    ended: list[int] = []
    monkeypatch.setattr(nccl_manners.os, "_exit", ended.append)

    def survive(seat: Seat) -> None:
        group = seat.join(backend=nccl_manners.BACKEND)
        seat.exchange("joined")
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        eventually(lambda: ended, "it goes on", 5.0)
        group.abort()
        work.wait()
        assert set(ended) == {nccl_manners.ENDED_BY_WATCHDOG}

    def be_killed(seat: Seat) -> None:
        seat.join(backend=nccl_manners.BACKEND)
        seat.exchange("joined")
        die()

    run_together(survive, be_killed)


@in_processes(3)
def test_a_member_that_leaves_as_planned_does_not_break_the_last_collective(
    seat: Seat, manners: Backend
) -> None:
    """Only an abort ends such a group, and it would do so while peers are in the collective."""
    for number in range(1, 21):
        group = seat.join(number, backend=manners)
        meet()
        group.settle()
        group.close()


def test_leaving_does_not_wait_long_for_a_member_that_is_gone(manners: Backend) -> None:
    def leave(seat: Seat) -> None:
        group = seat.join(backend=manners)
        meet()
        group.settle()
        seat.exchange("met")
        began = time.monotonic()
        group.close()
        assert time.monotonic() - began < 3.0
        assert not dist.is_initialized()

    def be_killed(seat: Seat) -> None:
        seat.join(backend=manners)
        meet()
        seat.exchange("met")
        die()

    run_together(leave, be_killed)


@pytest.mark.skipif(
    not hasattr(TCPStore, "list_keys"), reason="this torch cannot list the keys of a store"
)
@in_processes(2)
def test_past_groups_leave_no_keys_in_the_store_of_rank_0(seat: Seat) -> None:
    """One worker may have rank 0 in thousands of groups."""
    counts, store = [], seat.host._store
    for number in range(1, 8):
        group = seat.join(number)
        seat.exchange("joined")

        def left(kept: str = f"i/{number}/") -> list[str]:
            return [k for k in store.list_keys() if "/" in k and not k.startswith(kept)]

        eventually(lambda: seat.rank > 0 or not left(), lambda: f"{left()}", 20.0)
        counts.append(store.num_keys())
        seat.exchange("swept")
        group.close()
    assert max(counts[1:]) <= counts[0] + 2, counts


@in_processes(2)
def test_only_one_excepthook_of_torch_is_installed_after_any_number_of_groups(seat: Seat) -> None:
    """torch chains another hook with each group, until the hooks call each other too deep."""
    before = sys.excepthook
    for number in range(1, 6):
        group = seat.join(number)
        seat.exchange("joined")
        if number % 2:
            group.abort()
        group.close()
        assert sys.excepthook is before
    last = seat.join(6)
    hook = sys.excepthook
    seat.exchange("joined")
    sys.excepthook = lambda *found: hook(*found)  # the script's own stays
    mine = sys.excepthook
    last.close()
    assert sys.excepthook is mine


def _is_reachable(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(5.0)
        return client.connect_ex((address, port)) == 0


@pytest.mark.parametrize(
    ("host", "elsewhere"),
    [
        ("127.0.0.1", False),
        ("127.0.0.2", False),
        ("192.0.2.1", True),  # of no machine: translated on its way
        ("localhost", True),  # a name may stand for another address elsewhere
    ],
)
def test_the_store_listens_only_at_the_address_of_its_node(
    monkeypatch: pytest.MonkeyPatch, host: str, elsewhere: bool
) -> None:
    made: list[dict[str, Any]] = []

    class Store:
        def __init__(self, _: str, port: int, **options: Any) -> None:
            self.port = port
            made.append(options)

    monkeypatch.setattr(process_group, "TCPStore", Store)
    port = process_group.StoreHost(host).port
    with socket.socket(fileno=made[0]["master_listen_fd"]):
        assert _is_reachable("127.0.0.3", port) is elsewhere
        assert elsewhere or _is_reachable(host, port)


@in_processes(2)
def test_values_of_a_stranger_do_not_keep_a_group_from_meeting(seat: Seat) -> None:
    """A counter of arrivals that a stranger had increased would never be complete."""
    if seat.rank == 0:
        port = int(seat.generation().store_endpoint.rpartition(":")[2])
        stranger = TCPStore("127.0.0.1", port, is_master=False)
        for number in (1, 2):
            for key in ("arrived", "here/0", "here/7"):
                stranger.add(f"{seat.generation(number).store_prefix}/{key}", 5)
    seat.exchange("disturbed")
    for number in (1, 2):
        group = seat.join(number)
        dist.all_reduce(torch.ones(1))
        seat.exchange("reduced")
        group.close()
