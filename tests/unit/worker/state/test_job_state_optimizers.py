"""A member's optimizer takes over the groups and the state of another member's optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import CheckpointMismatch
from elastic.worker.state.job_state import JobState
from tests.unit.worker.around_optimizer import Lookahead
from tests.unit.worker.state.job_states import restore, tracking
from tests.unit.worker.trees import same


class Various(torch.optim.SGD):
    """Keeps more in its state than tensors of its parameters' type."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["sums"] = torch.full((2,), 0.1, dtype=torch.float64)
            for parameter in group["params"]:
                self.state[parameter].update(
                    preconditioners=[torch.full((2, 2), 0.1), (torch.full((1,), 0.3),)],
                    moments={"first": torch.full((2,), 0.7)},
                    counts=defaultdict(int, {"a": 1}),
                    phase="warm",
                    array=np.full(2, 0.1),
                    product=torch.tensor(0.1),
                    seen={1, 2},
                    last=None,
                )
        return super().step(closure)


def test_received_optimizer_state_keeps_the_types_of_all_its_values() -> None:
    def tracked() -> tuple[JobState, Various]:
        model = nn.Linear(2, 2).to(torch.bfloat16)
        optimizer = Various(model.parameters(), lr=0.1, momentum=0.9)
        return tracking({"model": model, "optimizer": optimizer}), optimizer

    (source, left), (target, right) = tracked(), tracked()
    source.modules()["model"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    left.step()
    restore(target, source)
    assert same(right.state_dict(), left.state_dict())
    assert target.digest() == source.digest()
    right.step()  # a step works with the received state


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_received_optimizer_state_has_the_memory_layout_of_the_parameters(
    fused: bool, around: bool
) -> None:
    """A fused step takes elements of parameter and state in the order of memory."""

    def tracked() -> tuple[JobState, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        optimizer = Lookahead(inner) if around else inner
        return tracking({"model": model, "optimizer": optimizer}), model, optimizer

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 2, 4, 4, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (source, left, left_optimizer), (target, right, right_optimizer) = tracked(), tracked()
    train(left, left_optimizer)
    restore(target, source)
    train(left, left_optimizer)
    train(right, right_optimizer)
    assert same(right.state_dict(), left.state_dict())


# ---- objects that a script refers to


def test_an_optimizer_keeps_its_group_and_state_objects_when_it_is_restored() -> None:
    sender, _ = grown(groups=2)
    receiver, optimizer = grown(groups=1)
    (groups, first), state = (optimizer.param_groups, *optimizer.param_groups), optimizer.state
    restore(receiver, sender)
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is first
    assert optimizer.state is state
    assert same(optimizer.state_dict(), sender.tracked["optimizer"].state_dict())
    first["lr"] = 0.5
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5


class Around(torch.optim.Optimizer):
    """Shares the groups of the optimizer inside it, as SAM does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {"rho": 0.05})
        self.inner = inner
        inner.param_groups = self.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


@pytest.mark.parametrize("names", [("around", "inner"), ("inner", "around")])
def test_an_optimizer_and_the_one_around_it_still_share_groups_after_a_restore(
    names: tuple[str, str],
) -> None:
    states = []
    for rate in (0.3, 0.1):
        torch.manual_seed(int(10 * rate))
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        made = {"around": Around(inner), "inner": inner}
        state = tracking({"model": model, **{name: made[name] for name in names}})
        states.append((state, made))
    (sender, _), (receiver, made) = states
    restore(receiver, sender)
    assert made["inner"].param_groups[0]["lr"] == 0.3
    made["around"].param_groups[0]["lr"] = 0.15
    assert made["inner"].param_groups[0]["lr"] == 0.15
    assert made["inner"].param_groups is made["around"].param_groups


def test_an_optimizer_class_with_its_own_state_dict_is_restored_on_another_member() -> None:
    def make_around(rate: float, steps: int) -> tuple[JobState, Lookahead]:
        torch.manual_seed(steps)
        model = nn.Linear(2, 1)
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=rate))
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return tracking({"model": model, "optimizer": optimizer}), optimizer

    (sender, theirs), (receiver, mine) = make_around(0.3, 4), make_around(0.1, 0)
    restore(receiver, sender)
    assert same(mine.state_dict(), theirs.state_dict())
    assert receiver.digest() == sender.digest()
    assert mine.param_groups is mine.inner.param_groups
    assert mine.param_groups[0]["lr"] == 0.3


class Precise(torch.optim.SGD):
    """Keeps momentum in float32 whatever the parameters' type, and adds notes to its state_dict."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in [p for group in self.param_groups for p in group["params"]]:
            mean = self.state[p].setdefault("mean", torch.zeros(p.shape))
            p.sub_(mean.mul_(0.9).add_(p.grad.float(), alpha=0.1).to(p.dtype))
        return closure

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "notes": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "notes"})


@pytest.mark.parametrize("around", [lambda o: o, Lookahead], ids=["itself", "inside"])
def test_optimizer_state_of_another_type_than_the_parameters_keeps_its_type(
    around: Callable[[torch.optim.Optimizer], torch.optim.Optimizer],
) -> None:
    def make_precise(steps: int) -> JobState:
        torch.manual_seed(steps)
        model = nn.Linear(2, 1, dtype=torch.bfloat16)
        optimizer = around(Precise(model.parameters(), lr=0.1))
        for _ in range(steps):
            model(torch.randn(1, 2, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        return tracking({"model": model, "optimizer": optimizer})

    sender, receiver = make_precise(4), make_precise(0)
    restore(receiver, sender)
    assert receiver.digest() == sender.digest()


# ---- which parameters are trained


def grown(*, groups: int, named: bool = False) -> tuple[JobState, torch.optim.Optimizer]:
    """A model of two layers, and an optimizer of the first or, with `groups=2`, of both."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    body, head = (list((m.named_parameters if named else m.parameters)()) for m in model)
    optimizer = torch.optim.SGD(body, lr=0.1, momentum=0.9)
    if groups == 2:
        optimizer.add_param_group({"params": head, "lr": 0.02})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return tracking({"model": model, "optimizer": optimizer}), optimizer


@pytest.mark.parametrize("named", [False, True])
def test_parameter_groups_that_a_script_adds_later_are_added_to_a_newcomers_optimizer(
    named: bool,
) -> None:
    sender, _ = grown(groups=2, named=named)
    receiver, optimizer = grown(groups=1, named=named)
    restore(receiver, sender)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 2]
    assert optimizer.param_groups[1]["lr"] == 0.02
    assert same(optimizer.state_dict(), sender.tracked["optimizer"].state_dict())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "formed",
    [["0.weight", "1.weight"], ["1.weight 1.bias", "0.weight 0.bias"], ["0.bias", "1.bias"]],
)
@pytest.mark.parametrize("built", [1, 2])
def test_parameters_that_a_script_regroups_are_regrouped_in_a_newcomers_optimizer(
    built: int, formed: list[str], named: bool
) -> None:
    sender, optimizer = grown(groups=2, named=named)
    parameters = dict(sender.modules()["model"].named_parameters())
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for paths, rate in zip(formed, (0.3, 0.2), strict=True):
        added = [(path, parameters[path]) for path in paths.split()]
        params: Any = added if named else [p for _, p in added]
        optimizer.add_param_group({"params": params, "lr": rate})
    optimizer.step()
    receiver, mine = grown(groups=built, named=named)
    groups = mine.param_groups
    out = formed != ["1.weight 1.bias", "0.weight 0.bias"]
    with pytest.warns(UserWarning, match=r"no longer trains model\.") if out else nullcontext():
        restore(receiver, sender)
    assert same(mine.state_dict(), optimizer.state_dict())
    assert receiver.digest() == sender.digest()
    assert mine.param_groups is groups
    assert receiver.extra()["parameter_groups"] == sender.extra()["parameter_groups"]


def test_a_parameter_group_of_untracked_parameters_is_refused() -> None:
    sender, optimizer = grown(groups=1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    receiver, _ = grown(groups=1)
    with pytest.raises(CheckpointMismatch, match="2 parameter groups in the saved state and 1"):
        restore(receiver, sender)


def test_a_parameter_group_is_added_beside_one_with_a_parameter_of_no_module() -> None:
    """The parameter of no module, such as a temperature, stays in its group."""

    def make_both(rate: float) -> tuple[JobState, torch.optim.Optimizer]:
        model, own = nn.Linear(2, 1), nn.Parameter(torch.full((), rate))
        optimizer = torch.optim.SGD([own], lr=rate, momentum=0.9)
        (model(torch.ones(1, 2)).sum() * own).backward()
        return tracking({"model": model, "optimizer": optimizer}), optimizer

    (sender, theirs), (receiver, mine) = make_both(0.3), make_both(0.1)
    theirs.add_param_group({"params": sender.modules()["model"].parameters(), "lr": 0.02})
    theirs.step()
    restore(receiver, sender)
    assert same(mine.state_dict(), theirs.state_dict())
    assert [len(group["params"]) for group in mine.param_groups] == [1, 2]


def test_parameter_groups_are_formed_in_an_optimizer_that_has_none() -> None:
    (sender, theirs), (receiver, mine) = grown(groups=2), grown(groups=1)
    mine.param_groups.clear()
    restore(receiver, sender)
    assert same(mine.state_dict(), theirs.state_dict())
