"""A tree of state is split into named tensors and JSON, and put together again unchanged."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel

from elastic.errors import CheckpointDamaged, ConfigurationError
from elastic.worker.state.tree import flatten, unflatten
from tests.unit.worker.trees import same, trees


def _through_json(state: object) -> Any:
    flat = flatten(state)
    return unflatten(json.loads(json.dumps(flat.skeleton, allow_nan=False)), flat.tensors)


@given(trees)
def test_any_tree_survives_a_round_trip(state: object) -> None:
    assert same(_through_json(state), state)


def test_tensors_are_named_by_dotted_paths() -> None:
    weight, momentum = torch.zeros(2), torch.ones(2)
    state = {
        "model": collections.OrderedDict({"conv1.weight": weight}),
        "optimizer": {"state": {0: {"momentum_buffer": momentum}}, "groups": [(weight + 1,)]},
    }
    assert list(flatten(state).tensors) == [
        "model.conv1.weight",
        "optimizer.state.0.momentum_buffer",
        "optimizer.groups.0.0",
    ]


def test_paths_that_are_spelled_alike_get_distinct_tensor_names() -> None:
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 0: torch.tensor(3)}
    state |= {"0": torch.tensor(4), "__metadata__": torch.tensor(5), "\ud800": torch.tensor(6)}
    flat = flatten(state)
    assert len(flat.tensors) == 6
    assert "__metadata__" not in flat.tensors
    assert same(unflatten(flat.skeleton, flat.tensors), state)


def test_tied_weights_are_kept_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    flat = flatten(model.state_dict())
    assert list(flat.tensors) == ["0.weight"]
    assert same(unflatten(flat.skeleton, flat.tensors), model.state_dict())


def test_views_of_one_storage_are_not_taken_for_each_other() -> None:
    base = torch.arange(4.0)
    state = [base, base[:2], base.view(2, 2), base.view(2, 2).t(), base[:0], base[:0]]
    assert same(_through_json(state), state)


def test_sets_have_the_same_skeleton_in_every_process() -> None:
    words = [f"word {i}" for i in range(10)]  # their hashes differ from process to process
    assert flatten({*words, 2, 1}).skeleton == {"set": [1, 2, *words]}


class _Subclass(dict[str, int]):
    pass


def _circular() -> list[Any]:
    state: list[Any] = []
    state.append(state)
    return state


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        ({"a": [0, object()]}, r"type object at a\.1 "),
        ({"a": _Subclass()}, r"_Subclass at a "),
        ({"a": print}, r"builtin_function_or_method at a "),
        (object(), "at its root"),
        ({"a": torch.ones(2).to_sparse()}, r"Tensor at a .*sparse_coo"),
        ({"a": torch.ones(2, device="meta")}, r"Tensor at a .*meta device"),
        ({"a": np.array(["x"])}, r"ndarray at a .*<U1"),
        ({"a": np.longdouble(1)}, "longdouble at a "),
        ({"a": np.datetime64(0, "s")}, "datetime64 at a "),
        ({torch.tensor(1): 1}, "as the key of a dictionary"),
        ({"a": collections.defaultdict(lambda: 0)}, "whose factory"),
        (_circular(), "contain itself"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_in_the_error(state: object, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=wrong) as caught:
        flatten(state)
    assert "state_dict()" in str(caught.value)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"tensor": "absent"},
        {"eval": "1"},
        {},
        {"tuple": 1},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"dtype": "load"},
        {"device": "nonsense"},
        {"number": ["object", 1]},
        {"defaultdict": [], "factory": "eval"},
        {"bytes": "zz"},
        {"list": [], "tuple": []},
    ],
)
def test_a_broken_skeleton_is_damage(skeleton: Any) -> None:
    with pytest.raises(CheckpointDamaged):
        unflatten(skeleton, {})


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(inputs).square().mean()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if name == "Muon":  # takes matrices only
        parameters = [parameter for parameter in parameters if parameter.ndim == 2]
    options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(name, {})
    return getattr(torch.optim, name)(parameters, lr=0.01, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_on_identically_after_a_round_trip(name: str) -> None:
    model, twin = _model(), _model()
    optimizer, other = _optimizer(name, model), _optimizer(name, twin)
    if name != "SparseAdam":  # its gradients are sparse; its state is that of Adam
        _train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copied = _through_json(state)
    assert same(copied, state)
    twin.load_state_dict({name: value.clone() for name, value in copied["model"].items()})
    other.load_state_dict(_through_json(_cloned(optimizer.state_dict())))
    if name != "SparseAdam":
        _train(model, optimizer)
        _train(twin, other)
    assert same(twin.state_dict(), model.state_dict())


def _cloned(state: Any) -> Any:
    flat = flatten(state)
    return unflatten(flat.skeleton, {name: t.clone() for name, t in flat.tensors.items()})


Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
    "ConstantLR": lr.ConstantLR,
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.1, 0.2),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "LRScheduler": lambda o: lr.ConstantLR(o),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lr.LinearLR,
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [1, 2, 2, 5]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lr.PolynomialLR,
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=5),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o), lr.MultiStepLR(o, [1, 2])], milestones=[2]
    ),
    "StepLR": lambda o: lr.StepLR(o, 2),
}


def test_every_scheduler_of_torch_is_covered() -> None:
    offered = {
        kind.__name__
        for kind in vars(lr).values()
        if isinstance(kind, type)
        and issubclass(kind, lr.LRScheduler)
        and not kind.__name__.startswith("_")
    }
    assert offered - SCHEDULERS.keys() == set()


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6's own SequentialLR warns
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_every_scheduler_goes_on_identically_after_a_round_trip(name: str) -> None:
    if name == "SWALR" and torch.__version__ < "2.7":
        pytest.skip("its state holds a function")
    optimizers = [torch.optim.SGD(_model().parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    scheduler, twin = (SCHEDULERS[name](optimizer) for optimizer in optimizers)
    _advance(optimizers[0], scheduler)
    state = scheduler.state_dict()
    assert same(_through_json(state), state)
    optimizers[1].load_state_dict(_through_json(optimizers[0].state_dict()))
    twin.load_state_dict(_through_json(state))
    rates = [_advance(*pair) for pair in zip(optimizers, (scheduler, twin), strict=True)]
    assert rates[0] == rates[1]


def _advance(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    rates = []
    for _ in range(4):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_survives_a_round_trip(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=1024.0)
    state = scaler.state_dict()
    twin = torch.amp.GradScaler("cpu", enabled=enabled)
    twin.load_state_dict(_through_json(state))
    assert twin.state_dict() == state
    assert twin.get_scale() == scaler.get_scale()


def test_the_metadata_of_a_module_survives_a_round_trip() -> None:
    model = AveragedModel(_model())
    back = _through_json(model.state_dict())
    assert back._metadata == model.state_dict()._metadata
    AveragedModel(_model()).load_state_dict(back)


def test_a_generator_state_survives_a_round_trip() -> None:
    generator = torch.Generator().manual_seed(3)
    state = _through_json({"rng": generator.get_state()})
    expected = torch.rand(3, generator=generator)
    generator.set_state(state["rng"])
    assert torch.equal(torch.rand(3, generator=generator), expected)
