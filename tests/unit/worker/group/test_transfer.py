"""State arrives bit for bit as it was sent, whatever the size of the chunks."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import GroupLost
from elastic.worker.group import transfer
from elastic.worker.group.losses import is_group_loss
from elastic.worker.group.process_group import Backend, Group
from elastic.worker.state.digest import bytes_of
from elastic.worker.state.tensor_specs import TensorSpec, describe
from tests import nccl_manners
from tests.unit.worker import together
from tests.unit.worker.together import GLOO, Seat, run_together
from tests.unit.worker.trees import DTYPES, make_tensor, same_tensor

SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (16, 4)])
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6).map(
    lambda kinds: [make_tensor(dtype, shape, seed) for seed, (dtype, shape) in enumerate(kinds)]
)


def named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{number:02}": tensor for number, tensor in enumerate(tensors)}


def chunks(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each chunk."""
    return [
        torch.cat(
            [
                bytes_of(block)
                for part in parts
                for block in transfer._blocks(tensors[part.name], part.start, part.stop)
            ]
        )
        for parts in transfer._chunks(describe(tensors))
    ]


@given(tensors=TENSORS, size=st.integers(1, 40))
def test_chunks_are_full_and_hold_every_byte_in_order(
    tensors: list[torch.Tensor], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", size)
        cut = chunks(named(tensors))
    largest = max((t.element_size() for t in tensors), default=1)
    assert all(0 < len(c) <= max(size, largest) for c in cut)
    assert all(len(c) > size - largest for c in cut[:-1])
    empty = torch.empty(0, dtype=torch.uint8)
    flat = [bytes_of(t) for t in tensors]
    assert torch.equal(torch.cat([empty, *cut]), torch.cat([empty, *flat]))


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    size=st.integers(1, 40),
)
def test_a_tensor_with_permuted_dimensions_is_sent_row_by_row(
    shape: list[int], order: random.Random, size: int
) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = make_tensor(torch.int32, tuple(shape)).permute(dims)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", size)
        assert torch.equal(torch.cat(chunks({"t": tensor})), bytes_of(tensor))


def test_host_tensors_share_no_chunk_with_device_tensors() -> None:
    specs = [
        TensorSpec(name=name, dtype="float32", shape=(3,), place=place)
        for name, place in (("a", "device"), ("b", "cpu"), ("c", "device"), ("d", "cpu"))
    ]
    assert [[p.name for p in c] for c in transfer._chunks(specs)] == [["b", "d"], ["a", "c"]]


def test_new_tensors_are_made_on_host_or_device_as_the_sender_has_them() -> None:
    """Adam's step count and the state of a CPU generator must stay on the host."""
    device = torch.device("meta")
    step = TensorSpec(name="step", dtype="float32", shape=(), place="cpu")
    moment = TensorSpec(name="moment", dtype="float32", shape=(2,), place="device")
    assert transfer._target(step, device, None).device.type == "cpu"
    assert transfer._target(moment, device, None).device == device


def state() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype, scalar and empty ones, and ones with awkward layouts."""
    return {
        **{f"{dtype}": make_tensor(dtype, (37,), seed) for seed, dtype in enumerate(DTYPES)},
        "scalar": make_tensor(torch.bfloat16, ()),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 4, dtype=torch.complex128),
        "transposed": make_tensor(torch.float64, (5, 9)).t(),
        "channels": make_tensor(torch.float32, (1, 3, 4, 5)).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(4, generator=torch.manual_seed(0))),
    }


@pytest.mark.parametrize("manners", [GLOO, nccl_manners.BACKEND], ids=lambda b: b.name)
@pytest.mark.parametrize("size", [61, transfer.CHUNK_BYTES], ids=["many chunks", "one chunk"])
def test_a_state_arrives_unchanged_in_another_process(
    size: int, manners: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", size)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl_manners.register()
    document = {"tensors": [["w", "float32", [2]]], "text": "ö" * 100, "number": 1e300}
    specs = describe(state())

    def send(seat: Seat) -> None:
        group, sent = seat.join(backend=manners), state()
        transfer.send_json(group, document, 1)
        assert send_all(group, sent) == sum(s.size_bytes for s in specs)
        assert send_all(group, {}) == 0

    def receive(seat: Seat) -> None:
        group = seat.join(backend=manners)
        assert transfer.receive_json(group, 0) == document
        received, count = transfer.receive_tensors(group, specs, 0)
        assert count == sum(s.size_bytes for s in specs)
        assert received.keys() == state().keys()
        for name, tensor in state().items():
            assert same_tensor(received[name], tensor.detach()), name
        assert transfer.receive_tensors(group, [], 0) == ({}, 0)

    run_together(send, receive)


def send_all(group: Group, tensors: dict[str, torch.Tensor]) -> int:
    return transfer.send_tensors(group, tensors, 1)


def other_state() -> dict[str, torch.Tensor]:
    """Return tensors with the layout of `state()`, all zero."""
    return {name: torch.zeros_like(tensor) for name, tensor in state().items()}


@pytest.mark.parametrize("size", [61, transfer.CHUNK_BYTES], ids=["many chunks", "one chunk"])
def test_a_live_state_is_overwritten_in_place(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", size)
    specs = describe(state())

    def send(seat: Seat) -> None:
        send_all(seat.join(), state())

    def receive(seat: Seat) -> None:
        live = other_state()
        received, _ = transfer.receive_tensors(seat.join(), specs, 0, live)
        for name, tensor in state().items():
            assert same_tensor(live[name].detach(), tensor.detach()), name
            assert received[name].data_ptr() == live[name].data_ptr(), name
            assert live[name].stride() == tensor.stride(), name

    run_together(send, receive)


@pytest.mark.parametrize("in_place", [False, True])
def test_only_what_differs_is_sent(in_place: bool) -> None:
    changed = ("scalar", "transposed", "channels")
    size = sum(s.size_bytes for s in describe({name: state()[name] for name in changed}))

    def send(seat: Seat) -> None:
        group = seat.join()
        assert send_all(group, state()) == size
        assert send_all(group, state()) == 0

    def receive(seat: Seat) -> None:
        group, live = seat.join(), state()
        for name in changed:
            live[name] = torch.zeros_like(live[name])
        into = live if in_place else {}
        received, count = transfer.receive_tensors(group, describe(state()), 0, into, known=live)
        assert count == size
        for name, tensor in state().items():
            assert same_tensor(received[name].detach(), tensor.detach()), name
            assert (received[name].data_ptr() == live[name].data_ptr()) == (
                in_place or name not in changed or not tensor.numel()
            ), name
        assert transfer.receive_tensors(group, describe(state()), 0, known=state())[1] == 0

    run_together(send, receive)


@pytest.mark.parametrize("manners", [GLOO, nccl_manners.BACKEND], ids=lambda b: b.name)
@pytest.mark.parametrize("size", [61, transfer.CHUNK_BYTES], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("in_place", [False, True])
def test_members_of_a_chain_receive_what_each_lacks(
    in_place: bool, size: int, manners: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", size)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl_manners.register()
    lacks = {1: ("scalar", "flag"), 2: (), 3: ("transposed", "parameter", "flag")}
    lacked = {name: state()[name] for rank in lacks for name in lacks[rank]}

    def send(seat: Seat) -> None:
        group = seat.join(backend=manners)
        transfer.send_json(group, {"text": "a"}, 1)
        assert send_all(group, state()) == sum(s.size_bytes for s in describe(lacked))

    def receive(seat: Seat) -> None:
        group, live = seat.join(backend=manners), state()
        for name in lacks[seat.rank]:
            live[name] = torch.zeros_like(live[name])
        then = seat.rank + 1 if seat.rank < 3 else None
        document = transfer.receive_json(group, seat.rank - 1)
        if then is not None:
            transfer.send_json(group, document, then)
        assert document == {"text": "a"}
        into = live if in_place else {}
        received, _ = transfer.receive_tensors(
            group, describe(state()), seat.rank - 1, into, known=live, then=then
        )
        for name, tensor in state().items():
            assert same_tensor(received[name].detach(), tensor.detach()), name
            assert (
                in_place
                or not tensor.numel()
                or name in lacks[seat.rank]
                or (received[name].data_ptr() == live[name].data_ptr())
            )

    run_together(send, receive, receive, receive)


def test_a_live_tensor_that_does_not_fit_is_left_alone() -> None:
    sent = {name: torch.arange(4.0) for name in ("shape", "dtype", "expanded", "inference", "new")}
    with torch.inference_mode():
        inference = torch.zeros(4)
    live = {
        "shape": torch.zeros(2, 2),
        "dtype": torch.zeros(4, dtype=torch.int32),
        "expanded": torch.zeros(1).expand(4),
        "inference": inference,
        "unknown": torch.zeros(4),
    }

    def send(seat: Seat) -> None:
        send_all(seat.join(), sent)

    def receive(seat: Seat) -> None:
        received, _ = transfer.receive_tensors(seat.join(), describe(sent), 0, live)
        assert received.keys() == sent.keys()
        assert all(torch.equal(r, torch.arange(4.0)) for r in received.values())
        assert not any(t.any() for t in live.values())

    run_together(send, receive)


def test_receiving_into_a_large_live_state_needs_no_memory_for_a_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 2**20)
    shape = (64, 2**18)  # 64 MiB; transposed, so that it is never contiguous

    def send(seat: Seat) -> None:
        send_all(seat.join(), {"w": torch.ones(shape).t()})

    def receive(seat: Seat) -> None:
        group, live = seat.join(), {"w": torch.full(shape, 2.0).t()}  # touched, unlike zeros
        before = peak_kb()
        transfer.receive_tensors(group, describe(live), 0, live)
        assert peak_kb() - before < 32 * 2**10
        assert bool((live["w"] == 1).all())

    run_together(send, receive)


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_an_aborted_transfer_raises_and_its_garbage_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a backend like NCCL no operation raises, and the length of a document is garbage."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    nccl_manners.register()

    def receive(seat: Seat) -> None:
        group = seat.join(backend=nccl_manners.BACKEND)
        threading.Timer(0.2, group.abort).start()
        with pytest.raises(GroupLost):
            transfer.receive_json(group, 1)
        seat.exchange("lost")

    def keep_silent(seat: Seat) -> None:
        seat.join(backend=nccl_manners.BACKEND)
        seat.exchange("lost")

    run_together(receive, keep_silent)


def test_a_transfer_waits_longer_than_the_timeout_of_joining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender may load a checkpoint or send to others first."""
    monkeypatch.setattr(together, "JOIN_TIMEOUT_S", 0.5)

    def come_late(seat: Seat) -> None:
        group = seat.join()
        time.sleep(0.7)
        transfer.send_json(group, "late", 1)

    def wait(seat: Seat) -> None:
        assert transfer.receive_json(seat.join(), 0) == "late"

    run_together(come_late, wait)


HUGE = 2**28  # bytes: more than the kernel buffers


def stop_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process stop for ever in the middle of the first huge chunk."""
    exchange = transfer._exchange

    def stop(group: Group, **messages: tuple[torch.Tensor, int] | None) -> None:
        for kind, message in messages.items():
            if message is not None and message[0].numel() == HUGE:
                work = (dist.isend if kind == "sends" else dist.irecv)(*message)
                assert work is not None
                os.kill(os.getpid(), signal.SIGSTOP)
        exchange(group, **messages)

    monkeypatch.setattr(transfer, "_exchange", stop)


def expect_freedom(group: Group, transfer: Callable[[], object]) -> None:
    """Assert that `transfer` ends soon after another thread has aborted the group."""
    threading.Timer(1.0, group.abort).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        transfer()
    assert is_group_loss(caught.value, group)
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("stopped", ["receiver", "sender"])
def test_an_abort_frees_a_member_that_waits_for_a_stopped_one(
    stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", HUGE)

    def send(seat: Seat) -> None:
        group, pids = seat.join(), seat.exchange(os.getpid())
        if stopped == "sender":
            stop_in_the_middle(monkeypatch)
        big = {"big": torch.zeros(HUGE, dtype=torch.uint8)}
        expect_freedom(group, lambda: send_all(group, big))
        os.kill(pids[1], signal.SIGKILL)

    def receive(seat: Seat) -> None:
        group, pids = seat.join(), seat.exchange(os.getpid())
        if stopped == "receiver":
            stop_in_the_middle(monkeypatch)
        spec = TensorSpec(name="big", dtype="uint8", shape=(HUGE,))
        expect_freedom(group, lambda: transfer.receive_tensors(group, [spec], 0))
        os.kill(pids[0], signal.SIGKILL)

    run_together(send, receive)
