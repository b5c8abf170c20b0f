"""A distributed model looks like its module and works like DDP, in one group after the other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from elastic.errors import ConfigurationError, StepMisused
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group
from elastic.worker.state.job_state import JobState


class Net(nn.Module):
    """A model with running statistics, an attribute and a method of its own."""

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


def enter(model: DistributedModel, group: Group) -> None:
    """Wrap the model for the group, and let its passes run as in a step's block."""
    model.wrap(group.backend)
    model.passes.together = True


@pytest.fixture
def model(net: Net, alone: Group) -> DistributedModel:
    model = DistributedModel(net, {})
    enter(model, alone)
    return model


def ddp_of(model: DistributedModel) -> nn.parallel.DistributedDataParallel:
    return model.passes.wrapper


class Rotary(nn.Module):
    """Has a cache that grows with the longest sequence, and a buffer that keeps its size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("running", torch.zeros(2), persistent=False)
        self.grow(4)

    def grow(self, length: int) -> None:
        self.register_buffer("cos", torch.arange(length).float().cos(), persistent=False)


def rotary(group: Group, length: int) -> tuple[JobState, Callable[[], set[str]]]:
    """Return a model's state, and a function that forms a group and returns what DDP ignores."""
    net = nn.Sequential(Rotary())
    net._ddp_params_and_buffers_to_ignore = ["told"]
    model, state = DistributedModel(net, {}), JobState()
    state.track({"model": model})
    net[0].grow(length)

    def ignored() -> set[str]:
        model.wrap(group.backend, state.buffers.caches_of_group())
        assert net._ddp_params_and_buffers_to_ignore == ["told"]
        return set(ddp_of(model).parameters_to_ignore)

    return state, ignored


def test_a_cache_that_has_grown_is_not_broadcast_in_later_groups(alone: Group) -> None:
    state, ignored = rotary(alone, length=4)
    assert ignored() == {"told"}
    state.modules()["model"].get_submodule("module.0").grow(9)
    assert ignored() == {"told", "0.cos"}
    state.modules()["model"].get_submodule("module.0").grow(4)
    assert ignored() == {"told", "0.cos"}


@pytest.mark.parametrize(("there", "here"), [(9, 4), (4, 9), (9, 9), (4, 4)])
def test_a_member_that_receives_a_state_ignores_the_same_caches(
    alone: Group, there: int, here: int
) -> None:
    (theirs, ignored_there), (mine, ignored_here) = rotary(alone, there), rotary(alone, here)
    for _ in range(2):
        flat = theirs.capture()
        mine.restore(flat.skeleton, flat.tensors, theirs.extra())
        assert ignored_here() == ignored_there() == ({"told", "0.cos"} if there == 9 else {"told"})


class Telling(nn.Sequential):
    _ddp_params_and_buffers_to_ignore = ("told",)


def test_buffers_that_a_class_tells_ddp_to_ignore_are_ignored_beside_a_cache(alone: Group) -> None:
    net = Telling(Rotary())
    model, state = DistributedModel(net, {}), JobState()
    state.track({"model": model})
    net[0].grow(9)
    model.wrap(alone.backend, state.buffers.caches_of_group())
    assert set(ddp_of(model).parameters_to_ignore) == {"told", "0.cos"}
    assert "_ddp_params_and_buffers_to_ignore" not in vars(net)


def test_a_distributed_model_has_the_attributes_and_names_of_its_module(net: Net) -> None:
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
        enter(model, alone)
    other = {name: torch.full_like(t, 3) for name, t in model.state_dict().items()}
    model.load_state_dict(other)
    assert torch.equal(net.last.weight, torch.full_like(net.last.weight, 3))
    assert not any(name.startswith("module.") for name in model.state_dict())


def test_a_model_computes_the_same_with_and_without_a_group(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {}).eval()
    inputs = torch.randn(3, 4)
    without = model(inputs)
    enter(model, alone)
    assert torch.equal(model(inputs), without)
    model.unwrap()
    assert torch.equal(model(inputs), without)


def test_options_are_passed_to_ddp(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {"gradient_as_bucket_view": True, "bucket_cap_mb": 7})
    enter(model, alone)
    assert ddp_of(model).gradient_as_bucket_view
    assert ddp_of(model).bucket_bytes_cap == 7 * 2**20


def test_only_the_last_micro_batch_is_reduced(model: DistributedModel) -> None:
    reductions: list[int] = []
    model.register_comm_hook(None, counting(reductions))
    for reduce in (False, False, True):
        model.reduce_gradients(reduce)
        step(model)
        assert bool(reductions) is reduce


def test_a_static_graph_is_learned_in_a_step_that_reduces(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {"static_graph": True})
    for _ in range(2):  # and again in the next group
        enter(model, alone)
        synced = []
        for reduce in (False, True, False, True):
            model.reduce_gradients(reduce)
            synced.append(ddp_of(model).require_backward_grad_sync)
            step(model)
        assert synced == [True, True, False, True]
        model.unwrap()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_comm_hook_is_registered_in_every_group(net: Net, alone: Group, wrapped: bool) -> None:
    model = DistributedModel(net, {})
    if wrapped:
        enter(model, alone)
    reductions: list[int] = []
    model.register_comm_hook(None, counting(reductions))
    for _ in range(2):
        model.unwrap()
        enter(model, alone)
        reductions.clear()
        step(model)
        assert reductions


def test_every_group_begins_with_the_original_state_of_the_hook(net: Net, alone: Group) -> None:
    """PowerSGD counts iterations, and runs other collectives once enough have passed."""
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model = DistributedModel(net, {})
    model.register_comm_hook(state, powerSGD_hook)
    seen: list[object] = []
    for _ in range(2):
        enter(model, alone)
        for _ in range(4):
            step(model)
        seen.append(state.iter)
        model.unwrap()
    assert seen == [0, 0]
    assert not state.error_dict


def test_none_or_a_process_group_as_hook_state_is_passed_unchanged(net: Net, alone: Group) -> None:
    """None means the default group; a group cannot be copied."""
    given: list[object] = []
    for state in (None, torch.distributed.group.WORLD):
        model = DistributedModel(net, {})
        model.register_comm_hook(state, hook_that(lambda state, _: given.append(state)))
        enter(model, alone)
        step(model)
        assert given.pop() is state


# ---- names, also where another module contains the model


class Wrapper(nn.Module):
    """A script's own module around a distributed one, such as a loss, a head or a trainer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1))


CONTAINERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda module: module,
    "AveragedModel": lambda module: torch.optim.swa_utils.AveragedModel(module, use_buffers=True),
    "a module of the script": Wrapper,
    "ModuleDict": lambda module: nn.ModuleDict({"generator": module, "other": nn.Linear(1, 1)}),
    "two levels": lambda module: Wrapper(Wrapper(module)),
    "a sequence": lambda module: nn.Sequential(module, nn.Linear(2, 2)),
    "a distributed model": lambda module: DistributedModel(module, {}),
}
containers = pytest.mark.parametrize("contain", CONTAINERS.values(), ids=CONTAINERS)


@containers
def test_names_are_those_of_the_plain_module_in_every_container(
    net: Net, contain: Callable[[nn.Module], nn.Module]
) -> None:
    plain, distributed = contain(net), contain(DistributedModel(net, {}))
    assert list(distributed.state_dict()) == list(plain.state_dict())
    for names in (nn.Module.named_parameters, nn.Module.named_buffers):
        assert [n for n, _ in names(distributed)] == [n for n, _ in names(plain)]
    tensors = dict([*distributed.named_parameters(), *distributed.named_buffers()])
    assert tensors.keys() == distributed.state_dict().keys()
    pairs = distributed.state_dict(keep_vars=True).items()
    assert all(tensors[name] is tensor for name, tensor in pairs)


@containers
@pytest.mark.parametrize("source_distributed", [False, True])
@pytest.mark.parametrize("target_distributed", [False, True])
def test_state_loads_between_plain_and_distributed_models_in_any_container(
    contain: Callable[[nn.Module], nn.Module], source_distributed: bool, target_distributed: bool
) -> None:
    def make(seed: int, distributed: bool) -> nn.Module:
        torch.manual_seed(seed)
        made = Net()
        made.norm.running_mean.fill_(seed)
        return contain(DistributedModel(made, {}) if distributed else made)

    source, target = make(1, source_distributed), make(2, target_distributed)
    given = source.state_dict()
    before = list(given)
    assert not target.load_state_dict(given).missing_keys
    assert list(given) == before  # the script's dictionary is unchanged
    found = target.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


@containers
def test_names_that_are_missing_or_unknown_are_refused(
    net: Net, contain: Callable[[nn.Module], nn.Module]
) -> None:
    model = contain(DistributedModel(net, {}))
    state = model.state_dict()
    name = next(n for n in state if n.endswith("first.weight"))
    with pytest.raises(RuntimeError, match=r"Missing key.*first\.weight"):
        model.load_state_dict({n: t for n, t in state.items() if n != name})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*first\.nonsense"):
        model.load_state_dict({**state, name.replace("weight", "nonsense"): state[name]})


def test_a_module_called_module_keeps_its_name() -> None:
    """Only the distributed model's own `module.` is left out of names."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    source = nn.ModuleDict({"a": Holder(), "ab": nn.Linear(1, 1)})
    target = nn.ModuleDict({"a": DistributedModel(Holder(), {}), "ab": nn.Linear(1, 1)})
    assert list(target.state_dict()) == list(source.state_dict())
    target.load_state_dict(source.state_dict())
    assert torch.equal(target["a"].module.module.weight, source["a"].module.weight)


# ---- assignments


class Scaled(Net):
    """Has an attribute of each kind, and a property."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("center", torch.ones(1))
        self.spare: nn.Module | None = nn.Linear(2, 2)

    @property
    def doubled(self) -> float:
        return 2 * self.temperature

    @doubled.setter
    def doubled(self, value: float) -> None:
        self.temperature = value / 2


@pytest.fixture
def scaled() -> Scaled:
    return Scaled()


def test_values_are_assigned_to_the_module_before_the_first_group_and_later(
    scaled: Scaled, alone: Group
) -> None:
    model = DistributedModel(scaled, {})
    for _ in range(2):
        scaled.temperature = 0.5
        model.temperature *= 0.5
        assert scaled.temperature == 0.25
        model.doubled = 3.0
        assert scaled.temperature == 1.5
        model.label = "new"
        assert scaled.label == model.label == "new"
        del model.label
        assert not hasattr(scaled, "label")
        model.training = False
        assert scaled.training, "as DDP's, the wrapper's mode is its own until train() or eval()"
        enter(model, alone)


REPLACEMENTS: dict[str, Callable[[nn.Module], None]] = {
    "layer": lambda m: setattr(m, "last", nn.Linear(8, 3)),
    "layer, to None": lambda m: setattr(m, "spare", None),
    "layer, deleted": lambda m: delattr(m, "spare"),
    "new layer": lambda m: setattr(m, "extra", nn.Linear(8, 3)),
    "new layer, added": lambda m: m.add_module("extra", nn.Linear(8, 3)),
    "new layer, registered": lambda m: m.register_module("extra", nn.Linear(8, 3)),
    "parameter": lambda m: setattr(m, "scale", nn.Parameter(torch.zeros(2))),
    "new parameter": lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(2))),
    "buffer": lambda m: setattr(m, "center", torch.zeros(2)),
    "new buffer": lambda m: setattr(m, "extra", nn.Buffer(torch.zeros(2))),
    "new buffer, registered": lambda m: m.register_buffer("extra", torch.zeros(2)),
}
replacements = pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)


@replacements
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_and_tensors_are_replaced_in_the_module_before_the_first_group(
    scaled: Scaled, replace: Callable[[nn.Module], None], compiled: bool
) -> None:
    model = DistributedModel(torch.compile(scaled, backend="eager") if compiled else scaled, {})  # type: ignore[arg-type]
    twin = Scaled()
    replace(model)
    replace(twin)
    shapes = {name: tensor.shape for name, tensor in twin.state_dict().items()}
    assert {name: tensor.shape for name, tensor in scaled.state_dict().items()} == shapes


@replacements
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("present", [True, False])
def test_layers_and_tensors_cannot_be_replaced_after_the_first_group(
    scaled: Scaled,
    replace: Callable[[nn.Module], None],
    alone: Group,
    compiled: bool,
    present: bool,
) -> None:
    model = DistributedModel(torch.compile(scaled, backend="eager") if compiled else scaled, {})  # type: ignore[arg-type]
    enter(model, alone)
    if not present:
        model.unwrap()
    before = {**dict(scaled.named_modules()), **scaled.state_dict(keep_vars=True)}
    with pytest.raises(StepMisused, match=r"model\.(last|spare|extra|scale|center) .* in place"):
        replace(model)
    after = {**dict(scaled.named_modules()), **scaled.state_dict(keep_vars=True)}
    assert after.keys() == before.keys()
    assert all(after[name] is item for name, item in before.items())


def test_tensors_may_be_changed_in_place_at_any_time(scaled: Scaled, alone: Group) -> None:
    model = DistributedModel(scaled, {})
    enter(model, alone)
    kept = scaled.center
    model.center *= 3
    assert scaled.center is kept
    assert kept.item() == 3
    with torch.no_grad():
        model.scale *= 2
    assert scaled.scale.item() == 2
    model.last = scaled.last


@pytest.mark.parametrize(
    "change", [lambda m: setattr(m, "module", Net()), lambda m: m.__delattr__("module")]
)
def test_the_module_itself_cannot_be_replaced(
    net: Net, change: Callable[[nn.Module], None]
) -> None:
    model = DistributedModel(net, {})
    with pytest.raises(StepMisused, match=r"model\.module"):
        change(model)
    assert model.module is net


def test_a_layer_that_other_members_cannot_fill_is_refused_when_it_is_assigned(net: Net) -> None:
    model = DistributedModel(net, {})
    with pytest.raises(ConfigurationError, match=r"last\.weight has no shape yet"):
        model.last = nn.LazyLinear(3)


# ---- copies


def test_a_deepcopy_is_an_independent_model_without_a_group(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {"bucket_cap_mb": 7})
    net.norm.eval()
    enter(model, alone)
    twin = copy.deepcopy(model)
    assert type(twin) is DistributedModel
    assert twin.module is not net
    assert same_values(twin, model)
    assert twin.passes.wrapper is None
    assert twin.training
    assert not twin.norm.training  # a frozen layer stays frozen
    step(twin)  # without a group
    assert all(p.grad is None for p in net.parameters())
    enter(twin, alone)
    assert ddp_of(twin).bucket_bytes_cap == 7 * 2**20


def test_a_model_is_pickled_as_one_without_a_group(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {"bucket_cap_mb": 1})
    enter(model, alone)
    step(model)
    model.eval()
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is DistributedModel
    assert not again.training
    inputs = torch.ones(2, 4)
    assert torch.equal(again(inputs), net(inputs))
    for one in (model, again):
        assert one.describe() == "a net"


class Gated(nn.Module):
    """A model with a parameter and a buffer of its own, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.gate = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * self.gate + self.shift


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
def test_functional_call_and_export_take_a_model_for_its_module(
    alone: Group, wrapped: bool, compiles: bool
) -> None:
    plain = Gated()
    model = DistributedModel(torch.compile(plain, backend="eager") if compiles else plain, {})
    if wrapped:
        enter(model, alone)
        model.passes.together = False  # between blocks
    inputs = torch.randn(3, 4)
    tensors = {n: 2 * t.detach() for n, t in [*plain.named_parameters(), *plain.named_buffers()]}
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    if not compiles:  # it renames them
        expected = torch.func.functional_call(plain, tensors, (inputs,))
        assert torch.equal(torch.func.functional_call(model, tensors, (inputs,)), expected)
        assert model.gate is plain.gate is dict(plain.named_parameters())["gate"]
        assert torch.equal(model(inputs), plain(inputs))
        exported = torch.export.export(model, (inputs,)).module()
        assert torch.allclose(exported(inputs), plain(inputs))
    assert torch.equal(model(inputs), plain(inputs))
    assert len(names) == len(set(names)) == 3


def test_a_gradient_of_a_gradient_through_functional_call_is_averaged(alone: Group) -> None:
    """As in meta-learning: the loss after a step that the script computes itself."""
    model, plain = DistributedModel(Gated(), {}), Gated()
    plain.load_state_dict(model.state_dict())
    enter(model, alone)
    inputs = torch.randn(3, 4)
    for each in (model, plain):
        weights = dict(each.named_parameters())
        inner = torch.func.functional_call(each.module if each is model else each, weights, inputs)
        gradients = torch.autograd.grad(inner.square().mean(), weights.values(), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        torch.func.functional_call(each, fast, inputs).square().mean().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad), name


def test_objects_shared_in_a_deepcopy_stay_shared(net: Net) -> None:
    model = DistributedModel(net, {})
    twin, again, layer = copy.deepcopy((model, model, net.last))
    assert twin is again
    assert twin.last is layer


def same_values(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# ---- options


@pytest.mark.parametrize("name", ["process_group", "device_mesh", "mixed_precision"])
def test_options_that_belong_to_one_group_are_refused(net: Net, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        DistributedModel(net, {name: object()})
    DistributedModel(net, {name: None})


# ---- which parameters are trained


def test_a_pass_outside_of_blocks_and_calls_makes_no_collective(net: Net, alone: Group) -> None:
    """Rank 0 may evaluate alone, with torch.no_grad() or without."""
    model = DistributedModel(net, {})
    enter(model, alone)
    model.passes.together = False
    before = alone.collectives()
    step(model)
    assert alone.collectives() == before
    assert net.last.weight.grad is not None


def test_each_set_of_trained_parameters_has_a_wrapper_of_its_own(
    net: Net, model: DistributedModel
) -> None:
    """A GAN freezes and thaws in every step, and so alternates between two wrappers."""
    whole = ddp_of(model)
    for _ in range(3):
        net.first.requires_grad_(False)
        model.reduce_gradients(True)
        step(model)
        assert ddp_of(model) is not whole
        assert net.first.weight.grad is None
        net.first.requires_grad_(True)
        model.reduce_gradients(True)
        step(model)
        assert ddp_of(model) is whole
        assert net.first.weight.grad is not None
        model.zero_grad()
    assert len(model.passes.wrappers) == 2


def test_gradual_thawing_keeps_few_wrappers(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {})
    net.requires_grad_(False)
    enter(model, alone)
    for parameter in reversed(list(net.parameters())):
        parameter.requires_grad_(True)
        model.reduce_gradients(True)
        step(model)
        trained = [p for p in net.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
        assert len(model.passes.wrappers) <= 4


def test_only_trained_parameters_are_reduced(net: Net, alone: Group) -> None:
    model = DistributedModel(net, {})
    net.first.requires_grad_(False)
    sizes: list[int] = []
    model.register_comm_hook(
        None, hook_that(lambda _, bucket: sizes.append(bucket.buffer().numel()))
    )
    enter(model, alone)
    step(model)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert sum(sizes) == trained


def test_parameters_frozen_between_micro_batches_are_noticed(
    net: Net, model: DistributedModel
) -> None:
    model.begin_block()
    model.reduce_gradients(False)
    step(model)
    net.first.requires_grad_(False)
    model.reduce_gradients(True)
    kept = net.first.weight.grad.clone()
    step(model)
    assert ddp_of(model).require_backward_grad_sync
    assert len(model.passes.wrappers) == 2
    assert torch.equal(net.first.weight.grad, kept)


def test_a_model_without_trained_parameters_needs_no_ddp(net: Net, alone: Group) -> None:
    model = DistributedModel(net.requires_grad_(False), {})
    enter(model, alone)
    model.begin_block()
    assert model(torch.randn(3, 4)).shape == (3, 2)
    net.requires_grad_(True)
    model.begin_block()
    step(model)
    assert model.passes.wrapper is not None


def hook_that(notes: Callable[[object, Any], None]) -> Callable[..., Any]:
    """Return a hook that reduces nothing. No annotations: DDP compares them with the types."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        notes(state, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


def counting(reductions: list[int]) -> Callable[..., Any]:
    return hook_that(lambda _, bucket: reductions.append(bucket.index()))


def expanded() -> nn.Module:
    module = nn.Linear(2, 1)
    module.register_buffer("mask", torch.ones(1, 1).expand(3, 3))
    return module


def inferred() -> nn.Module:
    module = nn.Linear(2, 1)
    with torch.inference_mode():
        module.register_buffer("mask", torch.ones(3))
    return module


def conjugate() -> nn.Module:
    module = nn.Linear(2, 1)
    module.register_parameter("phases", nn.Parameter(torch.ones(3, dtype=torch.complex64).conj()))
    return module


def sparse(layout: torch.layout) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Linear(2, 1)
        adjacency = torch.eye(3).to_sparse(layout=layout)
        module.register_buffer("adjacency", adjacency, persistent=False)
        return module

    return make


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"Sequential\): 0\.weight has no shape yet"),
        (expanded, r"Linear\): mask has elements that share memory"),
        (inferred, r"Linear\): mask was made in torch\.inference_mode"),
        (conjugate, r"Linear\): phases is a lazy conjugate"),
        (sparse(torch.sparse_coo), r"Linear\): adjacency has the layout torch\.sparse_coo"),
        (sparse(torch.sparse_csr), r"Linear\): adjacency has the layout torch\.sparse_csr"),
    ],
    ids=["lazy", "expanded", "inference", "conjugate", "sparse", "compressed"],
)
def test_tensors_that_cannot_be_filled_are_refused_by_name(
    make: Callable[[], nn.Module], what: str
) -> None:
    with pytest.raises(ConfigurationError, match=what):
        DistributedModel(make(), {})


def test_an_expanded_dimension_of_size_one_is_accepted() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("positions", torch.arange(4).expand((1, -1)))
    DistributedModel(module, {})


def test_no_sync_is_refused_with_what_to_write_instead(net: Net) -> None:
    with pytest.raises(StepMisused, match=r"accumulate=N"):
        DistributedModel(net, {}).no_sync()


def test_layers_that_change_after_the_wrapping_are_refused(alone: Group) -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    model = DistributedModel(layers, {})
    model.require_same_layers()
    enter(model, alone)
    model.require_same_layers()
    layers.append(nn.Linear(2, 1))
    with pytest.raises(StepMisused, match=r"new: 1\.weight, 1\.bias"):
        model.require_same_layers()
    del layers[0]
    del layers[0]
    with pytest.raises(StepMisused, match="some are gone"):
        model.require_same_layers()
