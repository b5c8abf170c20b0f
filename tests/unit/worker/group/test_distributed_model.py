"""A distributed model looks like its module and works like DDP, in one group after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group


class Net(nn.Module):
    """A layer with running statistics, and something to be reached by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.temperature = 0.5

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))

    def describe(self) -> str:
        return "a net"


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module, seed: int = 0) -> None:
    inputs = torch.randn(6, 4, generator=torch.manual_seed(seed))
    model(inputs).square().mean().backward()


def ddp_of(model: DistributedModel) -> nn.parallel.DistributedDataParallel:
    return model._hidden[0]


def test_it_has_the_modules_face(net: Net) -> None:
    model = DistributedModel(net, {})
    assert list(model.state_dict()) == list(net.state_dict())
    assert model.temperature == 0.5
    assert model.describe() == "a net"
    assert model.last is net.last
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense
    assert list(model.parameters()) == list(net.parameters())
    model.eval()
    assert not net.norm.training


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_is_loaded_into_the_module(net: Net, alone: Group, wrapped: bool) -> None:
    model = DistributedModel(net, {})
    if wrapped:
        model.wrap(alone.backend)
    other = {name: torch.full_like(t, 3) for name, t in model.state_dict().items()}
    model.load_state_dict(other)
    assert torch.equal(net.last.weight, torch.full_like(net.last.weight, 3))
    assert not any(name.startswith("module.") for name in model.state_dict())


def test_with_and_without_a_group_it_computes_the_same(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {}).eval()
    inputs = torch.randn(3, 4)
    without = model(inputs)
    model.wrap(alone.backend)
    assert torch.equal(model(inputs), without)
    model.unwrap()
    assert torch.equal(model(inputs), without)


def test_unwrapping_drops_gradients(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {})
    model.wrap(alone.backend)
    step(model)
    assert all(p.grad is not None for p in net.parameters())
    model.unwrap()
    assert all(p.grad is None for p in net.parameters())
    model.wrap(alone.backend)
    step(model)
    assert all(p.grad is not None for p in net.parameters())


def test_options_are_ddps(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {"gradient_as_bucket_view": True, "bucket_cap_mb": 7})
    model.wrap(alone.backend)
    assert ddp_of(model).gradient_as_bucket_view
    assert ddp_of(model).bucket_bytes_cap == 7 * 2**20


def test_buffers_are_restored(net: Net) -> None:
    model = DistributedModel(net, {})
    for seed in range(2):
        model.save_buffers()
        before = {name: b.clone() for name, b in net.named_buffers()}
        step(model, seed)
        assert net.norm.num_batches_tracked.item() == before["norm.num_batches_tracked"] + 1
        model.restore_buffers()
        assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
        step(model, seed)


def test_a_model_without_buffers_has_none_to_restore() -> None:
    model = DistributedModel(nn.Linear(2, 2), {})
    model.save_buffers()
    model.restore_buffers()


def test_only_the_last_micro_batch_is_reduced(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {})
    model.wrap(alone.backend)
    reductions: list[int] = []
    model.register_comm_hook(None, counting(reductions))
    for reduce in (False, False, True):
        model.reduce_gradients(reduce)
        step(model)
        assert bool(reductions) is reduce


def test_a_static_graph_learns_in_a_step_that_reduces(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {"static_graph": True})
    for _ in range(2):  # and again in the next group
        model.wrap(alone.backend)
        synced = []
        for reduce in (False, True, False, True):
            model.reduce_gradients(reduce)
            synced.append(ddp_of(model).require_backward_grad_sync)
            step(model)
        assert synced == [True, True, False, True]
        model.unwrap()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_hook_is_registered_in_every_group(net: Net, alone: Group, wrapped: bool) -> None:
    model = DistributedModel(net, {})
    if wrapped:
        model.wrap(alone.backend)
    reductions: list[int] = []
    model.register_comm_hook(None, counting(reductions))
    for _ in range(2):
        model.unwrap()
        model.wrap(alone.backend)
        reductions.clear()
        step(model)
        assert reductions


def test_every_group_begins_with_the_hooks_state_as_it_was(net: Net, alone: Group) -> None:
    """PowerSGD counts iterations, and runs other collectives once enough have passed."""
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model = DistributedModel(net, {})
    model.register_comm_hook(state, powerSGD_hook)
    seen: list[object] = []
    for _ in range(2):
        model.wrap(alone.backend)
        for _ in range(4):
            step(model)
        seen.append(state.iter)
        model.unwrap()
    assert seen == [0, 0]
    assert not state.error_dict


def test_a_state_without_attributes_is_passed_on(net: Net, alone: Group) -> None:
    """None means the default group; a group can not be copied."""
    given: list[object] = []
    for state in (None, torch.distributed.group.WORLD):
        model = DistributedModel(net, {})
        model.register_comm_hook(state, hook_that(lambda state, _: given.append(state)))
        model.wrap(alone.backend)
        step(model)
        assert given.pop() is state


def hook_that(notes: Callable[[object, Any], None]) -> Callable[..., Any]:
    """A hook that reduces nothing. Without annotations: DDP compares them with the types."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        notes(state, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


def counting(reductions: list[int]) -> Callable[..., Any]:
    """A hook that writes down its calls."""
    return hook_that(lambda _, bucket: reductions.append(bucket.index()))
