"""In every style of training, a block that is given up is undone exactly, wherever it is lost."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.worker.state.cells import NumpyGenerator, PythonGenerator, TorchGenerator
from tests.unit.worker.state.undoing import (
    WIDE,
    Action,
    Script,
    add,
    layer,
    learn_by_digests,
    nothing,
    step_of,
    write_data,
)
from tests.unit.worker.trees import same


@pytest.fixture(params=[4, WIDE], ids=["small", "large"])
def net(request: pytest.FixtureRequest) -> nn.Linear:
    return layer(request.param)


STYLES: dict[str, Callable[[nn.Linear], tuple[dict[str, Any], Action, Action]]] = {}


def style(
    make: Callable[[nn.Linear], tuple[dict[str, Any], Action, Action]],
) -> Callable[[nn.Linear], tuple[dict[str, Any], Action, Action]]:
    """make: returns the tracked objects and the actions before and after the last collective."""
    STYLES[make.__name__] = make
    return make


@style
def sam_perturbs_the_weights(net: nn.Linear) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return {"model": net, "optimizer": optimizer}, add(net), step_of(optimizer, net)


@style
def a_scheduler_steps_at_the_top(net: nn.Linear) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    tracked = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    return tracked, scheduler.step, step_of(optimizer, net)


@style
def a_momentum_encoder_is_written_through_data(net: nn.Linear) -> Any:
    encoder = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tracked = {"model": net, "encoder": encoder, "optimizer": optimizer}
    return tracked, write_data(encoder), step_of(optimizer, net)


@style
def a_fused_optimizer_steps_before_a_later_collective(net: nn.Linear) -> Any:
    critic = copy.deepcopy(net)
    first = torch.optim.AdamW(critic.parameters(), lr=0.1, fused=True)
    second = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    tracked = {"model": net, "critic": critic, "first": first, "second": second}
    return tracked, step_of(first, critic), step_of(second, net)


@style
def an_optimizer_makes_its_state(net: nn.Linear) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return {"model": net, "optimizer": optimizer}, step_of(optimizer, net), nothing


@style
def parameters_are_assigned_new_data(net: nn.Linear) -> Any:
    def assign() -> None:
        net.weight.data = net.weight.data + 1.0

    return {"model": net}, assign, nothing


@style
def flags_are_toggled(net: nn.Linear) -> Any:
    def toggle() -> None:
        net.weight.requires_grad_(not net.weight.requires_grad)

    return {"model": net}, toggle, nothing


@style
def modes_are_toggled(net: nn.Linear) -> Any:
    part = nn.Sequential(net, nn.Dropout())
    return {"model": nn.Sequential(part)}, lambda: part.train(not part.training), nothing


@style
def values_of_the_script_change(net: nn.Linear) -> Any:
    class Meter:
        def __init__(self) -> None:
            self.history: list[float] = []
            self.best = torch.zeros(3)

        def state_dict(self) -> dict[str, Any]:
            return {"history": list(self.history), "best": self.best}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.history = list(state["history"])
            self.best = state["best"].clone()

    meter = Meter()

    def change() -> None:
        meter.history.append(0.5)
        meter.best += 1.0

    return {"model": net, "meter": meter}, change, change


@style
def batch_norm_counts_batches(net: nn.Linear) -> Any:
    norm = nn.BatchNorm1d(net.in_features)
    model = nn.Sequential(net, norm)

    def forward() -> None:
        model(torch.randn(3, net.in_features))

    return {"model": model}, forward, nothing


@style
def buffers_are_assigned_anew(net: nn.Linear) -> Any:
    net.register_buffer("count", torch.zeros(1))
    net.register_buffer("queue", torch.zeros_like(net.weight))

    def assign() -> None:
        net.count = net.count + 1  # type: ignore[operator]
        net.queue = torch.roll(net.queue, 1) + 0.5  # type: ignore[arg-type]

    return {"model": net}, assign, nothing


@style
def generators_are_drawn_from(net: nn.Linear) -> Any:
    named = {
        "torch": TorchGenerator(torch.Generator().manual_seed(1)),
        "numpy": NumpyGenerator(np.random.default_rng(1)),
        "python": PythonGenerator(random.Random(1)),
    }

    def draw() -> None:
        torch.rand(3, generator=named["torch"].generator)
        named["numpy"].generator.normal(size=3)  # type: ignore[union-attr]
        named["python"].generator.gauss(0.0, 1.0)  # type: ignore[union-attr]

    return {"model": net, **named}, draw, draw


@style
def averaged_weights_are_updated_before_a_collective(net: nn.Linear) -> Any:
    average = torch.optim.swa_utils.AveragedModel(net)

    def update() -> None:
        add(net)()
        average.update_parameters(net)

    return {"model": net, "average": average}, update, nothing


class Counting(torch.optim.SGD):
    """Keeps more than rates in its groups, as apex's and some published optimizers do, and more
    than tensors in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("norms", []).append(0.5)
            group.setdefault("distance", torch.zeros(1)).add_(1.0)
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept.setdefault("seen", set()).add(group["step"])
                kept.setdefault("sums", np.zeros(2))[:] += 1.0
                kept.setdefault("counts", defaultdict(int))["steps"] += 1
                kept.setdefault("pair", ([0.5],))[0].append(1.0)
        return super().step(closure)


@style
def an_optimizer_keeps_what_it_likes(net: nn.Linear) -> Any:
    optimizer = Counting(net.parameters(), lr=0.1, momentum=0.9)
    return {"model": net, "optimizer": optimizer}, step_of(optimizer, net), nothing


@style
def an_optimizer_loses_a_group_and_a_setting(net: nn.Linear) -> Any:
    optimizer = torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.1)
    optimizer.param_groups[0]["stage"] = 1

    def take_away() -> None:
        del optimizer.param_groups[1:]
        optimizer.param_groups[0].pop("stage", None)

    return {"model": net, "optimizer": optimizer}, take_away, nothing


@style
def a_scheduler_gets_an_attribute(net: nn.Linear) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def count() -> None:
        scheduler.calls = getattr(scheduler, "calls", 0) + 1

    return {"model": net, "optimizer": optimizer, "scheduler": scheduler}, count, nothing


class Plain:
    """A tracked object whose state is its values."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


@style
def values_change_in_type_order_and_sign_alone(net: nn.Linear) -> Any:
    plain = Plain(
        best=1, first=0.0, array=np.zeros((2, 3)), pair=[1, 2], tensor=torch.zeros(2), last=3
    )

    def change() -> None:
        values = plain.values
        values["best"] = True if type(values["best"]) is int else 1.0
        values["first"] = -values.pop("first")
        values["array"] = values["array"].reshape(3, 2).astype(np.int64)
        values["pair"] = tuple(values["pair"])
        values["tensor"] = -values["tensor"]

    return {"model": net, "plain": plain}, change, nothing


@style
def values_are_in_dictionaries_of_other_kinds(net: nn.Linear) -> Any:
    weight = torch.ones(2, requires_grad=True)
    plain = Plain(
        losses=defaultdict(list), ordered=OrderedDict(a=torch.zeros(1)), counts=Counter("a")
    )

    def change() -> None:
        plain.values["losses"]["train"] = [*plain.values["losses"]["train"], (weight * 2).detach()]
        plain.values["ordered"]["b"] = plain.values["ordered"].pop("a", torch.zeros(1)) + 1
        plain.values["counts"]["b"] += 1

    return {"model": net, "plain": plain}, change, nothing


@style
def tensors_change_their_shape(net: nn.Linear) -> Any:
    net.register_buffer("grows", torch.zeros(4))
    net.register_buffer("turns", torch.zeros(200, 100))

    def change() -> None:
        with torch.no_grad():
            net.grows.resize_(net.grows.numel() + 5).fill_(3.0)  # type: ignore[union-attr,operator]
            net.turns.t_()  # type: ignore[union-attr,operator]

    return {"model": net}, change, nothing


@pytest.mark.parametrize("name", STYLES)
def test_a_block_is_undone_exactly(name: str, net: nn.Linear) -> None:
    tracked, before, after = STYLES[name](net)
    script = Script(**tracked)
    assert script.lost(before)
    assert script.lost(before, after)
    script.learn(before, after)
    for _ in range(3):
        assert script.lost(before)
        script.block(before, after)


@style
def an_optimizer_without_state_steps_before_a_collective(net: nn.Linear) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return {"model": net, "optimizer": optimizer}, step_of(optimizer, net), nothing


@pytest.mark.parametrize("by_digests", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_repeated_changes_are_undone_in_each_of_the_first_blocks(
    monkeypatch: pytest.MonkeyPatch, name: str, net: nn.Linear, by_digests: bool
) -> None:
    """The first block that does not learn is one of them."""
    if by_digests:
        learn_by_digests(monkeypatch)
    tracked, before, after = STYLES[name](net)
    script = Script(**tracked)
    for _ in range(9):
        script.block(before, after)
        assert script.lost(before)


@pytest.mark.parametrize("name", STYLES)
def test_a_retried_block_ends_bit_for_bit_like_one_that_was_never_lost(name: str) -> None:
    """Compares a run with a loss at every block with a run without any."""
    found = []
    for lossy in (False, True):
        torch.manual_seed(3)
        tracked, before, after = STYLES[name](layer(8))
        script = Script(**tracked)
        torch.manual_seed(4)
        for _ in range(6):
            if lossy:
                assert script.lost(before)
            script.block(before, after)
        found.append(script.everything())
    assert same(*found)
