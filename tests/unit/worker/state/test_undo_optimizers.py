"""The state of optimizers and gradient scalers is undone with the block."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.unit.worker.around_optimizer import Lookahead
from tests.unit.worker.state.undoing import (
    LEARNT,
    WIDE,
    Script,
    both,
    gradients,
    layer,
    nothing,
    step_of,
    trained,
)
from tests.unit.worker.trees import same


@pytest.mark.parametrize("stage", ["unscaled", "stepped", "updated"])
@pytest.mark.parametrize("after_updates", [0, 2])
def test_the_stage_of_a_gradscaler_is_put_back(stage: str, after_updates: int) -> None:
    """Otherwise unscale_() raises in the retry on every survivor."""
    net = layer(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    script = Script(model=net, optimizer=optimizer, scaler=scaler)

    def scaled_step() -> None:
        scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        if stage in ("stepped", "updated"):
            scaler.step(optimizer)
        if stage == "updated":
            scaler.update()

    def whole_step() -> None:
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(after_updates):
        script.block(after=whole_step)
    scale = scaler.get_scale()
    assert script.lost(scaled_step)
    assert scaler.get_scale() == scale
    script.block(after=whole_step)
    assert scaler.get_scale() == 2 * scale


def test_a_gradscaler_that_is_not_enabled_may_be_tracked() -> None:
    """Scripts write `enabled=use_amp`, or `GradScaler("cuda")` where there is no GPU."""
    net = layer(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    script = Script(model=net, optimizer=optimizer, scaler=scaler)

    def scaled_step() -> None:
        scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    script.block(after=scaled_step)
    before = copy.deepcopy(net.state_dict())
    assert script.lost(scaled_step)
    assert same(net.state_dict(), before)
    script.block(after=scaled_step)


def test_optimizer_state_created_in_a_lost_block_is_removed() -> None:
    net, optimizer, script = trained(torch.optim.Adam, 4)
    assert script.lost(step_of(optimizer, net))
    assert len(optimizer.state) == 0


def test_tensors_of_optimizer_state_keep_their_identity_when_put_back() -> None:
    net, optimizer, script = trained(torch.optim.Adam, 4)
    script.block(after=step_of(optimizer, net))
    moment = optimizer.state[net.weight]["exp_avg"]
    assert script.lost(step_of(optimizer, net))
    assert optimizer.state[net.weight]["exp_avg"] is moment


def test_a_parameter_group_added_in_a_lost_block_is_removed() -> None:
    net, head = layer(4), layer(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    script = Script(model=net, head=head, optimizer=optimizer)
    script.block(after=step_of(optimizer, net))

    def grow() -> None:
        optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.5})
        step_of(optimizer, net, head)()

    assert script.lost(grow)
    assert len(optimizer.param_groups) == 1
    assert script.lost(grow)
    script.block(after=grow)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("change", ["append", "move", "replace"])
def test_parameters_moved_between_groups_in_a_lost_block_are_moved_back(change: str) -> None:
    first, second, late = layer(4), layer(4), layer(4)
    optimizer = torch.optim.SGD(
        [{"params": list(m.parameters()), "lr": 0.1} for m in (first, second)]
    )
    script = Script(a=first, b=second, c=late, optimizer=optimizer)
    script.learn()

    def members() -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in optimizer.param_groups]

    def regroup() -> None:
        groups = optimizer.param_groups
        match change:
            case "append":
                groups[1]["params"].extend(late.parameters())
            case "move":
                groups[1]["params"].append(groups[0]["params"].pop())
            case "replace":
                groups[0]["params"] = list(late.parameters())

    before = members()
    script.undo.begin()
    regroup()
    assert members() != before
    assert script.undo.put_back()
    assert members() == before


def test_a_scripts_change_to_the_state_of_a_later_parameter_is_noticed() -> None:
    net = nn.Sequential(layer(), layer())
    optimizer = torch.optim.Adam(net.parameters())
    script = Script(model=net, optimizer=optimizer)
    gradients(net)
    script.learn(after=optimizer.step)
    last = list(net.parameters())[-1]

    def damp() -> None:
        optimizer.state[last]["exp_avg"].mul_(0.5)

    assert not script.lost(damp)
    script.block(damp, optimizer.step)
    for _ in range(3):
        assert script.lost(damp)
        script.block(damp, optimizer.step)


def test_a_learning_rate_tensor_keeps_its_identity_when_put_back() -> None:
    """Captured graphs read this tensor."""
    rate = torch.tensor(0.5)
    _, optimizer, script = trained(torch.optim.SGD, 4, lr=rate)

    def halve() -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    assert script.lost(halve)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_two_optimizers_that_take_turns_are_put_back_in_either_turn() -> None:
    nets = [layer(), layer()]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, fused=True) for net in nets]
    script = Script(a=nets[0], b=nets[1], first=optimizers[0], second=optimizers[1])
    turns = [step_of(o, n) for o, n in zip(optimizers, nets, strict=True)]
    for number in range(LEARNT):
        script.block(after=turns[number % 2])
    for number in range(4):
        assert script.lost()
        script.block(after=turns[number % 2])


@pytest.mark.parametrize("place", ["before the reduction", "after it"])
def test_parameters_that_a_fused_optimizer_trains_are_put_back_with_its_state(place: str) -> None:
    """Fused steps move no version of the parameters. Here they seldom come before a collective, and
    in no block that is learned from, as where every hundredth step averages its loss."""
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)
    step = step_of(optimizer, net)
    first = place == "before the reduction"
    seldom = (step, nothing) if first else (nothing, both(step, script.reduce))
    script.learn(nothing, step)
    assert not script.lost(*seldom)
    script.block(*seldom)
    script.block(nothing, step)
    assert script.lost(*seldom)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("width", [4, WIDE])
@pytest.mark.parametrize("fused", [False, True])
def test_the_state_of_an_optimizer_around_another_one_is_undone(
    fused: bool, width: int, steps: int
) -> None:
    net = nn.Linear(width, width)
    optimizer = Lookahead(torch.optim.Adam(net.parameters(), lr=0.1, fused=fused))
    script = Script(model=net, optimizer=optimizer)
    optimizer.inner.register_step_post_hook(lambda o, *_: script.optimizers.stepped(o))

    def step() -> None:
        net(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    script.learn(before=step)
    for _ in range(steps):  # so that the slow weights move in one of the blocks
        before = copy.deepcopy(optimizer.inner.state_dict())
        assert script.lost(before=step)
        assert same(optimizer.inner.state_dict(), before)
        assert optimizer.param_groups is optimizer.inner.param_groups
        script.block(before=step)
    script.undo.begin()
    after = script.everything()
    step()
    assert not same(script.everything(), after)
    assert script.undo.put_back()
    assert same(script.everything(), after)


def test_a_state_that_has_moved_to_another_parameter_is_still_looked_at() -> None:
    net, optimizer, script = trained(torch.optim.Adam)
    script.learn(after=step_of(optimizer, net))
    old, net.weight = net.weight, nn.Parameter(net.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = net.weight
    optimizer.state[net.weight] = optimizer.state.pop(old)
    for _ in range(8):
        script.block(after=step_of(optimizer, net))
    assert not script.lost(lambda: optimizer.state[net.weight]["exp_avg"].zero_())


def test_a_number_in_an_optimizers_state_says_nothing_of_what_it_trains() -> None:
    net, optimizer, script = trained(torch.optim.SGD, 600, momentum=0.9)

    def rescale() -> None:
        for state in optimizer.state.values():
            state["scale"] = state.get("scale", 0.0) + 1.0

    script.learn(rescale, step_of(optimizer, net))
    ((names, _),) = script.told
    assert names == ["optimizer"]


def test_a_parameter_that_a_group_gets_in_place_of_another_stays_after_a_later_block() -> None:
    net, optimizer, script = trained(torch.optim.SGD)
    script.learn(after=step_of(optimizer, net))
    other = nn.Parameter(torch.ones_like(net.weight))
    optimizer.param_groups[0]["params"][0] = other
    assert script.lost()
    assert optimizer.param_groups[0]["params"][0] is other
    assert script.undo.holds_commit
    with script.undo.as_of_commit():
        pass
    assert optimizer.param_groups[0]["params"][0] is other
