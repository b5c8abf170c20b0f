"""Tensors that share memory in one member share it in a member that receives its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic.worker.state.job_state import JobState
from elastic.worker.state.tensor_specs import describe
from tests.unit.worker.state.job_states import make, restore, tracking
from tests.unit.worker.trees import same


class Tied(nn.Module):
    """Reads and writes with the same weights, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(5, 3)
        self.write = nn.Linear(3, 5, bias=False)
        self.write.weight = self.read.weight


class Shadow:
    """Keeps tensors by name: those that it loads, or copies of them."""

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies
        self.tensors: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tensors = state_dict["tensors"]
        self.tensors = {n: t.clone() for n, t in tensors.items()} if self.copies else tensors


def sharing(seed: int) -> JobState:
    """A job's state. With seed 1, its tensors share memory in many ways."""
    torch.manual_seed(seed)
    model = Tied()
    shadows = {"shadow": Shadow(copies=False), "copies": Shadow(copies=True)}
    state = tracking({"model": model, **shadows})
    if seed == 1:
        for shadow in shadows.values():
            shadow.tensors = copy.deepcopy(dict(model.state_dict()))
        state.values["best"] = copy.deepcopy(model.state_dict())
        state.values["now"] = model.read.weight.detach()
        state.values["loss"] = state.values["lowest"] = torch.ones(())
    return state


@pytest.mark.parametrize("held_before", [False, True])
def test_a_receiver_shares_memory_and_describes_its_tensors_as_the_sender_does(
    held_before: bool,
) -> None:
    source, target = sharing(1), sharing(2)
    if held_before:
        target.values["loss"], target.values["lowest"] = torch.zeros(()), torch.zeros(())
        target.values["best"] = {"read.weight": torch.zeros(5, 3)}
    restore(target, source)
    assert describe(target.capture().tensors) == describe(source.capture().tensors)
    names = [n for n in source.capture().tensors if n.startswith("model.")]
    assert names == ["model.read.weight"]
    assert same(target.values.state_dict(), source.values.state_dict())
    assert target.values["loss"] is target.values["lowest"]
    for tied in (target.values["best"], target.tracked["shadow"].state_dict()["tensors"]):
        tied["read.weight"].fill_(7.0)
        assert bool((tied["write.weight"] == 7.0).all())


@pytest.mark.parametrize("best_there", [True, False])
def test_values_that_alias_model_and_optimizer_alias_them_in_a_newcomer(best_there: bool) -> None:
    """The values are a state_dict() without a copy, and one that an optimizer has loaded."""
    source, target = make(1), make(2)
    optimizer = source.optimizers()[0]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    model = source.modules()["model"]
    source.values["best"] = [
        {"optimizer": saved, "model": model.state_dict(), "own": torch.ones(1)}
    ]
    if best_there:
        target.values["best"] = copy.deepcopy(source.values["best"])
    restore(target, source)
    for state in (source, target):
        for parameter in state.modules()["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state.optimizers()[0].step()
    assert same(target.values.state_dict(), source.values.state_dict())
    assert source.digest() == target.digest()


def test_values_in_tuples_that_alias_a_model_alias_it_in_a_newcomer() -> None:
    source, target = make(1), make(2)
    model = source.modules()["model"]
    source.values["best"] = (0.5, [(model.state_dict(), 3)], next(model.parameters()).detach())
    restore(target, source)
    for state in (source, target):
        add_to(state.modules()["model"])
    assert same(target.values.state_dict(), source.values.state_dict())
    assert target.digest() == source.digest()


def add_to(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5)


@pytest.mark.parametrize("inside", [lambda v: v, lambda v: [(1, v)]], ids=["alone", "in a tuple"])
def test_values_that_alias_a_model_only_in_the_newcomer_no_longer_alias_it(inside: Any) -> None:
    """A script may begin with the model's state_dict(), and replace it by a copy once there is a
    better one."""
    source, target = make(1), make(2)
    source.values["best"] = inside(copy.deepcopy(source.modules()["model"].state_dict()))
    add_to(source.modules()["model"])
    target.values["best"] = inside(target.modules()["model"].state_dict())
    restore(target, source)
    for state in (source, target):
        add_to(state.modules()["model"])
    assert same(target.values.state_dict(), source.values.state_dict())
    assert target.digest() == source.digest()


def test_an_object_that_aliases_a_model_tracked_later_is_captured_alike_by_a_receiver() -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, engine = Tied(), Shadow(copies=True)
        engine.tensors = dict(model.state_dict())
        state = tracking({"engine": engine, "model": model})
        states.append(state)
    source, target = states
    restore(target, source)
    assert same(target.capture().tensors, source.capture().tensors)


class Refilled(nn.Module):
    """Clears what it has before it loads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.counts = torch.arange(1.0, 4.0)
        if way == "hook":
            self.register_load_state_dict_pre_hook(lambda *_: self.clear())

    def clear(self) -> None:
        self.counts.zero_()
        with torch.no_grad():
            self.weight.zero_()

    def get_extra_state(self) -> torch.Tensor:
        return self.counts

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.counts.zero_()
        self.counts += state


class RefilledInside(Refilled):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.clear()
        super()._load_from_state_dict(*arguments)


class RefilledOutside(Refilled):
    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        self.clear()
        return super().load_state_dict(*arguments, **named)


@pytest.mark.parametrize("way", ["", "hook", "inside", "outside"])
def test_a_module_that_clears_what_it_loads_receives_what_it_has_already(way: str) -> None:
    kinds = {"inside": RefilledInside, "outside": RefilledOutside}
    source, target = (tracking({"model": kinds.get(way, Refilled)(way)}) for _ in range(2))
    restore(target, source)
    assert same(target.capture().tensors, source.capture().tensors)


@pytest.mark.parametrize("part", [lambda w: w.view(-1), lambda w: w[0], lambda w: w.t()])
def test_a_frozen_parameter_stays_right_beside_a_value_that_is_part_of_it_only_here(
    part: Any,
) -> None:
    states = []
    for aliases in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        state = tracking({"model": net})
        value = part(net[0].weight.detach())
        state.values["kept"] = value if aliases else torch.zeros_like(value)
        states.append(state)
    source, target = states
    restore(target, source)
    mine, theirs = target.capture().tensors, source.capture().tensors
    assert same(mine["model.0.weight"], theirs["model.0.weight"])


def test_parameters_that_loading_leaves_alone_need_not_be_received() -> None:
    assert make(0).comparable().keys() == {
        *("model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias")
    }
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    tied = tracking({"model": net})
    assert tied.comparable().keys() == {"model.0.bias", "model.1.bias"}
    assert tied.comparable().keys() <= tied.capture().tensors.keys()
