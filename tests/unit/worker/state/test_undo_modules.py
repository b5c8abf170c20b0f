"""The parameters and buffers of modules are undone, and so are the caches that they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from elastic.errors import ConfigurationError
from elastic.worker.state.cells import Modes, cells_of
from tests.unit.worker.state.collecting import Collecting
from tests.unit.worker.state.late_buffers import LATE, Late, WithNumber
from tests.unit.worker.state.undoing import CPU, WIDE, Script, add, layer, nothing, tracking
from tests.unit.worker.trees import same


def test_a_large_buffer_that_is_reassigned_now_and_then_is_put_back() -> None:
    net = layer()
    net.register_buffer("queue", torch.zeros(WIDE, WIDE))

    def assign() -> None:
        net.queue = torch.roll(net.queue, 1) + 0.5  # type: ignore[arg-type]

    script = Script(model=net)
    script.learn()
    script.block(assign)
    script.block()
    assert script.lost(assign)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_removing_a_parameter_for_good_is_refused(name: str) -> None:
    net, script = tracking()
    script.block()
    prune.l1_unstructured(net, name, amount=0.3)
    with pytest.raises(ConfigurationError, match=rf"model has lost .* \({name}, as by pruning"):
        script.block()


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_buffer_made_in_inference_mode_is_put_back_if_seen_before(seen_before: bool) -> None:
    net = layer(4)
    net.register_buffer("count", torch.zeros(WIDE, WIDE))

    def count() -> None:
        with torch.inference_mode():
            net.count = net.count + 1

    script = Script(model=net)
    count()
    script.learn(count if seen_before else nothing)
    assert script.lost(count) is seen_before
    script.block(count)


def test_copies_share_no_memory_whatever_their_types_and_layouts() -> None:
    net = nn.Module()
    odd = torch.arange(70001, dtype=torch.int8)
    for name, tensor in {
        "odd": odd,
        "halves": torch.randn(33, 1001).half(),
        "none": torch.empty(0, 3),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "turned": torch.randn(300, 200).t(),
        "complex": torch.randn(257, dtype=torch.complex64),
        "flag": torch.tensor(True),
    }.items():
        net.register_buffer(name, tensor)
    script = Script(model=net)

    def change() -> None:
        for buffer in net.buffers():
            buffer.copy_(~buffer if buffer.dtype is torch.bool else buffer * 2 + 1)

    script.learn(change)
    assert script.lost(change)


def test_tensors_that_two_tracked_objects_share_belong_to_the_first() -> None:
    net = layer()
    twin = nn.Sequential(net, layer(4))
    large, small = cells_of({"model": net, "twin": twin}, CPU)
    sizes = {cell.name: cell.size_bytes() for cell in [*large, *small] if cell.size_bytes()}
    assert sizes == {"model": WIDE * (WIDE + 1) * 4, "twin": 4 * 5 * 4}


def test_tied_weights_are_put_back_as_one() -> None:
    net = nn.Sequential(layer(), layer())
    net[1].weight = net[0].weight
    script = Script(model=net)
    assert script.lost(add(net))
    assert net[1].weight is net[0].weight
    assert script.lost(lambda: setattr(net[0].weight, "data", net[0].weight.data + 1.0))


def test_a_buffer_removed_in_a_lost_block_comes_back() -> None:
    net = layer()
    net.register_buffer("cache", torch.ones(WIDE, WIDE))
    script = Script(model=net)
    assert script.lost(lambda: setattr(net, "cache", None))
    script.learn()
    assert not script.lost(lambda: setattr(net, "cache", None))  # no counted block has done it


class Rotary(nn.Module):
    """Computes a longer cache when a longer sequence comes."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0
        self.grow(length)

    def grow(self, length: int) -> None:
        self.longest = length
        self.register_buffer("cos", torch.arange(length).float().cos(), persistent=False)

    def forward(self, inputs: torch.Tensor, length: int) -> torch.Tensor:
        self.calls += 1
        if length > self.longest:
            self.grow(length)
        return self.layer(inputs) * self.cos[:length].sum()


@pytest.mark.parametrize("long", [4, 2 * WIDE * WIDE])
def test_a_cache_that_grew_in_a_lost_block_is_put_back_with_its_length(long: int) -> None:
    net = nn.Sequential(Rotary(long))
    script = Script(net=net)
    assert script.lost(lambda: net[0](torch.ones(1, 2), long + 1))
    assert net[0].longest == len(net[0].cos) == long
    net[0](torch.ones(1, 2), long + 1)
    calls = net[0].calls
    assert script.lost(lambda: net[0](torch.ones(1, 2), long + 1))
    assert net[0].longest == len(net[0].cos) == long + 1
    assert net[0].calls == calls + 1  # a module's own counter is not undone


class Stretched(nn.Module):
    """Computes other frequencies, equally many, when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.stretch(4)

    def stretch(self, length: int) -> None:
        self.longest = length
        self.register_buffer("inverse", torch.ones(3) / length, persistent=False)

    def forward(self, inputs: torch.Tensor, length: int) -> torch.Tensor:
        if length > self.longest:
            self.stretch(length)
        return self.layer(inputs) * self.inverse.sum()


def test_frequencies_computed_in_a_lost_block_are_put_back_with_their_length() -> None:
    net = Stretched()
    script = Script(net=net)
    assert script.lost(lambda: net(torch.ones(1, 2), 9))
    assert net.longest == 4
    net(torch.ones(1, 2), 9)  # once more, in the new group
    assert torch.equal(net.inverse, torch.ones(3) / 9)


def test_a_buffer_first_filled_in_a_lost_block_is_none_again() -> None:
    """A first forward pass may make such a cache."""
    net = layer(4)
    net.register_buffer("cache", None)
    script = Script(model=net)
    assert script.lost(lambda: setattr(net, "cache", torch.ones(2)))
    assert net.cache is None


@pytest.mark.parametrize("length", [3, WIDE * WIDE])
@pytest.mark.parametrize("kind", LATE)
def test_a_buffer_registered_in_a_lost_block_is_removed_and_later_put_back(
    kind: type[Late], length: int
) -> None:
    late = kind(length)
    script = Script(model=nn.Sequential(layer(4), late))
    assert script.lost(late)
    assert script.lost(late)
    for _ in range(3):
        script.block(late)
        assert script.lost(late)
    assert late.seen.unique().tolist() == [3.0]


@pytest.mark.parametrize("kind", [kind for kind in LATE if kind is not WithNumber])
def test_a_buffer_registered_below_a_block_that_does_not_count_is_removed(kind: type[Late]) -> None:
    late = kind()
    script = Script(model=nn.Sequential(layer(4), late))
    script.block()
    script.undo.begin()
    script.below_void_block(late)
    script.block(late)
    assert late.seen.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("where", ["before the call", "in the call"])
def test_a_lost_call_is_undone_around_a_late_buffer(kind: type[Late], where: str) -> None:
    late = kind()
    script = Script(model=nn.Sequential(layer(4), late))
    script.block()
    if where == "before the call":
        script.block(late)
    assert script.undo.holds_commit == (where == "in the call")
    before = script.everything()
    for _ in range(2):
        script.undo.begin_call("train.py:9")
        late()
        assert script.undo.put_back_call()
        assert same(script.everything(), before)
    script.undo.begin_call("train.py:9")
    late()
    script.undo.end_call("train.py:9")
    after = script.everything()
    with script.undo.as_of_call():
        late()
    assert same(script.everything(), after)


def test_what_a_metric_collects_in_a_lost_block_is_removed() -> None:
    metric = Collecting()
    script = Script(metric=metric)
    for _ in range(24):
        assert script.lost(metric.update)
        script.block(metric.update)
    assert len(metric.collected) == int(metric.seen) == 24


def test_what_a_metric_collects_now_and_then_is_reported_or_removed() -> None:
    metric = Collecting()
    metric.update()
    script = Script(metric=metric)
    script.learn()
    assert not script.lost(metric.update)
    metric.collected.pop()
    metric.seen -= 1
    script.block(metric.update)
    assert script.lost(metric.update)


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_buffer_replaced_for_the_first_time_is_noticed_wherever_its_memory_is(times: int) -> None:
    net = layer()
    net.register_buffer("cache", torch.zeros(WIDE, WIDE))
    script = Script(model=net)
    script.learn()

    def replace() -> None:
        for _ in range(times):
            net.cache = net.cache + 1  # type: ignore[operator,assignment]

    assert not script.lost(replace)


class WithOwnMode(nn.Linear):
    """Keeps its mode elsewhere."""

    @property
    def training(self) -> bool:  # type: ignore[override]
        return bool(vars(self).get("mode", True))

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self)["mode"] = mode


def test_layers_that_do_nothing_with_their_mode_follow_the_module_that_they_are_in() -> None:
    norm, frozen = nn.BatchNorm1d(4), nn.Dropout()
    part = nn.Sequential(nn.Linear(4, 4), frozen)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), norm, part)
    frozen.eval()
    script = Script(model=net)
    assert script.lost(net.eval)
    assert [m.training for m in (net, net[0], net[1], norm, part, part[0])] == [True] * 6
    assert not frozen.training
    (modes,) = (cell for cell in cells_of({"model": net}, CPU)[1] if isinstance(cell, Modes))
    assert modes.copy() == ([True, True, True, False], []), "of the model, the norm and the rest"


def with_another_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x if layer.training else 2 * x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "make", [lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), with_another_forward]
)
def test_a_layer_in_which_a_hook_or_the_script_reads_its_mode_is_looked_at(
    make: Callable[[], nn.Module],
) -> None:
    layer = make()
    script = Script(model=nn.Sequential(nn.Linear(4, 4), layer))
    assert script.lost(layer.eval)
    assert layer.training


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_mode_of_a_module_may_be_a_property() -> None:
    net = WithOwnMode(4, 4)
    script = Script(model=net, compiled=torch.compile(layer(4)))
    script.learn()
    assert script.lost(net.eval)
    assert net.training


def test_flags_of_a_parameter_that_was_replaced_are_put_back() -> None:
    net, script = tracking()
    script.block()
    net.weight = nn.Parameter(net.weight.detach())
    script.learn()
    assert script.lost(lambda: net.requires_grad_(False))


def test_a_parameter_replaced_by_a_frozen_one_stays_frozen() -> None:
    net, script = tracking()
    script.learn()
    net.weight = nn.Parameter(net.weight.detach().clone(), requires_grad=False)
    script.block()
    script.block()
    assert script.lost()
    assert not net.weight.requires_grad


def test_a_loss_before_a_missing_parameter_is_refused_is_no_error() -> None:
    net, script = tracking()
    script.learn()
    net.bias = None  # type: ignore[assignment]
    script.block()
    assert script.lost()


def test_a_parameter_that_comes_or_is_untied_in_a_lost_block_is_noticed() -> None:
    net = nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE))
    net[1].weight = net[0].weight
    script = Script(model=net)
    script.learn()
    new = nn.Parameter(torch.ones(WIDE))
    assert not script.lost(lambda: setattr(net[0], "bias", new))
    net[0].bias = None
    untied = nn.Parameter(torch.ones(WIDE, WIDE))
    assert not script.lost(lambda: setattr(net[1], "weight", untied))
