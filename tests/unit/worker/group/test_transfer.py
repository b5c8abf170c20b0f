"""State arrives bit by bit as it was sent, however it is cut into chunks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.group import transfer
from elastic.worker.group.process_group import Group, is_group_loss
from elastic.worker.state.tensor_specs import TensorSpec, describe
from tests.unit.worker import together
from tests.unit.worker.together import Seat, run_together
from tests.unit.worker.trees import DTYPES, make_tensor, same_tensor

SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (16, 4)])
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6).map(
    lambda kinds: [make_tensor(dtype, shape, seed) for seed, (dtype, shape) in enumerate(kinds)]
)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return transfer._bytes_of(tensor)


@given(tensors=TENSORS, size=st.integers(1, 40))
def test_chunks_are_full_and_hold_every_byte_in_order(
    tensors: list[torch.Tensor], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", size)
        flat = [bytes_of(t) for t in tensors]
        chunks = [torch.cat(pieces) for pieces in transfer._chunks(flat)]
    assert all(len(c) == size for c in chunks[:-1])
    assert all(0 < len(c) <= size for c in chunks[-1:])
    empty = torch.empty(0, dtype=torch.uint8)
    assert torch.equal(torch.cat([empty, *chunks]), torch.cat([empty, *flat]))


@given(tensors=TENSORS, size=st.integers(1, 40))
def test_splitting_and_joining_is_identity(tensors: list[torch.Tensor], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", size)
        joined = [torch.empty_like(t) for t in tensors]
        sources = transfer._chunks([bytes_of(t) for t in tensors])
        targets = transfer._chunks([bytes_of(t) for t in joined])
        for source, target in zip(sources, targets, strict=True):
            for have, want in zip(source, target, strict=True):
                want.copy_(have)
    assert all(map(same_tensor, tensors, joined))


def test_the_bytes_are_those_of_the_tensor_itself() -> None:
    """For what is received to land in it."""
    tensor = torch.zeros(3, dtype=torch.complex64)
    bytes_of(tensor).fill_(1)
    assert bool((torch.view_as_real(tensor) != 0).all())


def state() -> dict[str, torch.Tensor]:
    """Every type of element, alone and in bulk, and what is awkward to lay out."""
    return {
        **{f"{dtype}": make_tensor(dtype, (37,), seed) for seed, dtype in enumerate(DTYPES)},
        "scalar": make_tensor(torch.bfloat16, ()),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4, dtype=torch.complex128),
        "transposed": make_tensor(torch.float64, (5, 9)).t(),
        "channels": make_tensor(torch.float32, (1, 3, 4, 5)).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(4, generator=torch.manual_seed(0))),
    }


@pytest.mark.parametrize("size", [61, transfer.CHUNK_BYTES], ids=["many chunks", "one chunk"])
def test_a_state_sent_from_process_to_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", size)
    document = {"tensors": [["w", "float32", [2]]], "text": "ö" * 100, "number": 1e300}
    specs = describe(state())

    def send(seat: Seat) -> None:
        group, sent = seat.join(), state()
        transfer.send_json(group, document, 1)
        in_order = {s.name: sent[s.name] for s in specs}
        assert transfer.send_tensors(group, in_order, 1) == sum(s.size_bytes for s in specs)
        assert transfer.send_tensors(group, {}, 1) == 0

    def receive(seat: Seat) -> None:
        group = seat.join()
        assert transfer.receive_json(group, 0) == document
        received, count = transfer.receive_tensors(group, specs, 0)
        assert count == sum(s.size_bytes for s in specs)
        assert received.keys() == state().keys()
        for name, tensor in state().items():
            assert same_tensor(received[name], tensor.detach()), name
        assert transfer.receive_tensors(group, [], 0) == ({}, 0)

    run_together(send, receive)


def test_a_member_that_takes_longer_than_joining_may_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loads a checkpoint, or sends to others first."""
    monkeypatch.setattr(together, "JOIN_TIMEOUT_S", 0.5)

    def come_late(seat: Seat) -> None:
        group = seat.join()
        time.sleep(0.7)
        transfer.send_json(group, "late", 1)

    def wait(seat: Seat) -> None:
        assert transfer.receive_json(seat.join(), 0) == "late"

    run_together(come_late, wait)


HUGE = 2**28  # bytes: more than the kernel buffers


def stop_in_the_middle(group: Group) -> None:
    """Half of it has gone over the wire when this process stops for ever."""
    buffer = torch.empty(HUGE, dtype=torch.uint8)
    work = dist.irecv(buffer, 0) if group.rank == 1 else dist.isend(buffer, 1)
    assert work is not None
    os.kill(os.getpid(), signal.SIGSTOP)


def expect_freedom(group: Group, transfer: Callable[[], object]) -> None:
    """It ends soon after another thread has aborted the group."""
    threading.Timer(1.0, group.abort).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        transfer()
    assert is_group_loss(caught.value, group)
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("stopped", ["receiver", "sender"])
def test_whoever_waits_for_a_member_that_has_stopped_is_freed_by_an_abort(
    stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", HUGE)

    def send(seat: Seat) -> None:
        group, pids = seat.join(), seat.exchange(os.getpid())
        if stopped == "sender":
            stop_in_the_middle(group)
        big = {"big": torch.zeros(HUGE, dtype=torch.uint8)}
        expect_freedom(group, lambda: transfer.send_tensors(group, big, 1))
        os.kill(pids[1], signal.SIGKILL)

    def receive(seat: Seat) -> None:
        group, pids = seat.join(), seat.exchange(os.getpid())
        if stopped == "receiver":
            stop_in_the_middle(group)
        spec = TensorSpec(name="big", dtype="uint8", shape=(HUGE,))
        expect_freedom(group, lambda: transfer.receive_tensors(group, [spec], 0))
        os.kill(pids[0], signal.SIGKILL)

    run_together(send, receive)
