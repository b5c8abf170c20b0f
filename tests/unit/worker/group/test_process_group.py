"""Groups come up, break for everybody at once, and their end is told from other errors."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from elastic.core.membership import ChangeReason, Generation, Member
from elastic.errors import ConfigurationError, GroupLost
from elastic.worker.group.process_group import Group, first_line, is_group_loss
from tests.unit.worker.together import GLOO, Seat, die, meet, run_together

ALONE = Generation(number=1, incarnation="i", members=(), reason=ChangeReason.STARTED)
GROUP = Group(ALONE, 0, GLOO)

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
BUFFER = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
# What torch has raised when a peer or its connection was gone.
LOST = [
    RuntimeError(PAIR + "Connection closed by peer [127.0.0.1]:43210"),
    RuntimeError(PAIR + "Read error [127.0.0.1]:1234: Connection reset by peer"),
    RuntimeError(BUFFER + "Timed out waiting 1800000ms for recv operation to complete"),
    RuntimeError("Application timeout caused pair closure (gloo)"),
    RuntimeError("Broken pipe"),
    RuntimeError("Connection reset by peer"),
    RuntimeError("Rank 1 failed to recv, got 0 bytes. Connection was likely closed: recvValue"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0"),
    dist.DistNetworkError("The client socket has failed to connect to any network address"),
    dist.DistStoreError("wait timeout after 10000ms, keys: /i/1//0/1"),
    RuntimeError("NCCL Error 6: remote process exited or there was a network error"),
    GroupLost("generation 3 was superseded"),
]
# What a script gets wrong, alone or in a collective.
NOT_LOST = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("Expected to have finished reduction in the prior iteration"),
    RuntimeError("Trying to backward through the graph a second time"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed"),
    RuntimeError("Tensors must be contiguous"),
    RuntimeError("ProcessGroupGloo::allgather: invalid output tensor list at index 0"),
    ConnectionResetError("Connection reset by peer"),
    TimeoutError("socket timed out"),
    ValueError("gloo is a word"),
    ConfigurationError("choose another"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda e: str(e)[-30:])
def test_errors_of_a_lost_group(error: Exception) -> None:
    assert is_group_loss(error, GROUP)


@pytest.mark.parametrize("error", NOT_LOST, ids=lambda e: str(e)[-30:])
def test_errors_of_the_script(error: Exception) -> None:
    assert not is_group_loss(error, GROUP)


def test_without_a_group_none_can_be_lost() -> None:
    assert not is_group_loss(LOST[0], None)


def test_the_gist_of_an_error() -> None:
    assert first_line(RuntimeError("\nwhat\nException raised from...")) == "what"
    assert first_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("x" * 1000))) == 300


def expect_loss(group: Group, within_s: float = 1.0) -> None:
    """The collective that this process is or will be in breaks soon, as a lost group does."""
    began = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - judged below
        meet()
    assert is_group_loss(caught.value, group), repr(caught.value)
    assert time.monotonic() - began < within_s


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


def test_whoever_closes_frees_the_others_and_a_new_group_follows() -> None:
    """Also the members that have no connection to the dead one would wait for ever otherwise."""

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


def test_a_blocked_thread_is_freed_by_another() -> None:
    def block(seat: Seat) -> None:
        group = seat.join()
        timer = threading.Timer(0.1, group.abort)
        timer.start()
        expect_loss(group)
        assert group.aborted
        with pytest.raises(GroupLost, match="superseded"):
            group.check()
        seat.exchange("freed")

    def stay_away(seat: Seat) -> None:
        seat.join()
        seat.exchange("freed")

    run_together(block, stay_away)


def test_a_member_that_leaves_does_not_take_back_what_it_sent() -> None:
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


def test_errors_of_the_script_in_a_real_group_are_not_taken_for_its_loss() -> None:
    def mistake(seat: Seat) -> None:
        group = seat.join()
        for wrong in (
            lambda: dist.send(torch.zeros(1), 0),
            lambda: dist.all_gather([torch.zeros(1)] * 3, torch.zeros(1)),
        ):
            with pytest.raises(Exception, match=r"\w") as caught:
                wrong()
            assert not is_group_loss(caught.value, group), repr(caught.value)

    run_together(mistake)


def test_building_ends_when_it_is_aborted() -> None:
    """A member that does not come is the coordinator's to judge."""

    def wait(seat: Seat) -> None:
        group = Group(seat.generation(), seat.rank, GLOO)
        threading.Timer(0.1, group.abort).start()
        began = time.monotonic()
        with pytest.raises(GroupLost):
            group.build(seat.host, 10.0)
        assert time.monotonic() - began < 1.0
        seat.exchange("gave up")
        seat.join(2)
        meet()

    def come_late(seat: Seat) -> None:
        seat.exchange("gave up")
        seat.join(2)
        meet()

    run_together(wait, come_late)


def test_building_is_aborted_while_the_store_does_not_answer() -> None:
    """As when the host of rank 0 has died: connecting to it goes on for the whole time-out."""
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
            group.build(seat.host, 10.0)
        assert time.monotonic() - began < 1.0

    run_together(connect)
