"""Gradients that outlive a step are undone, and sent to newcomers if they accumulate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.unit.worker.state.undoing import Action, Script, gradients, layer, tracking
from tests.unit.worker.trees import same


def accumulate(net: nn.Module) -> Action:
    def backward() -> None:
        for parameter in net.parameters():
            grown = torch.full_like(parameter, 0.25)
            parameter.grad = grown if parameter.grad is None else parameter.grad.add_(grown)

    return backward


def grads(net: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.flatten()[0].item() for p in net.parameters()]


def accumulating(script: Script, net: nn.Module, *, zero: bool) -> None:
    """Begin a block and accumulate gradients by hand. zero: clear them first."""
    script.undo.begin()
    if zero:
        for parameter in net.parameters():
            parameter.grad = None
    script.undo.before_backward()
    accumulate(net)()
    script.reduce()


def accumulated(script: Script, net: nn.Module, *, zero: bool) -> None:
    accumulating(script, net, zero=zero)
    script.end()


def lost(script: Script, net: nn.Module, *, zero: bool) -> None:
    """Give an accumulating block up; assert that the gradients are as before it."""
    before = grads(net)
    accumulating(script, net, zero=zero)
    assert script.undo.put_back()
    assert grads(net) == before


def test_gradients_accumulated_by_hand_are_put_back() -> None:
    net, script = tracking(4)
    for _ in range(2):
        accumulated(script, net, zero=False)
    assert grads(net) == [0.5, 0.5]
    lost(script, net, zero=False)


def test_accumulated_gradients_are_sent_to_newcomers_and_leftover_ones_are_not() -> None:
    net, script = tracking(4)
    for zero, expected in ((True, 0), (False, 2)):
        for _ in range(3):
            accumulated(script, net, zero=zero)
        given = script.state.gradients.state_dict()["gradients"]
        assert len(given.get("model", {})) == expected


def test_a_newcomer_receives_accumulated_sparse_gradients_but_no_leftover_ones() -> None:
    """A script that zeroes gradients at the top of a block has leftover ones after each block."""

    def block(script: Script, words: nn.Embedding, zero: bool) -> None:
        script.undo.begin()
        if zero:
            words.zero_grad()
        script.undo.before_backward()
        words(torch.tensor([1, 2])).sum().backward()
        script.reduce()

    for zero, expected in ((True, 0), (False, 1)):
        source, target = nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)
        left, right = Script(words=source), Script(words=target)
        for _ in range(3):
            block(left, source, zero)
            left.end()  # raises if the state cannot be sent to others
        given = left.state.gradients.state_dict()
        assert len(given["gradients"].get("words", {})) == expected
        right.state.gradients.load_state_dict(copy.deepcopy(given))
        if expected:
            assert target.weight.grad is not None
            assert same(target.weight.grad.to_dense(), source.weight.grad.to_dense())  # type: ignore[union-attr]


def test_gradients_that_unexpectedly_accumulate_are_reported_as_not_put_back() -> None:
    net, script = tracking(4)
    for _ in range(3):
        accumulated(script, net, zero=True)
    accumulating(script, net, zero=False)
    assert not script.undo.put_back()
    for _ in range(2):
        accumulated(script, net, zero=False)
    lost(script, net, zero=False)


def test_gradients_zeroed_in_every_fourth_block_are_put_back_and_always_sent() -> None:
    net, script = tracking(4)
    for index in range(12):
        accumulated(script, net, zero=index % 4 == 0)
        assert len(script.state.gradients.state_dict()["gradients"]["model"]) == 2
        lost(script, net, zero=(index + 1) % 4 == 0)


def test_knowledge_about_gradients_from_a_lost_block_is_forgotten() -> None:
    """Members that lost the block at different points write shares of the same checkpoint."""
    net, other = layer(4), layer(4)
    far, near = Script(model=net), Script(model=other)
    for script, module in ((far, net), (near, other)):
        accumulated(script, module, zero=True)
    accumulating(far, net, zero=True)
    near.undo.begin()
    assert far.undo.put_back()
    assert near.undo.put_back()
    assert same(far.state.gradients.state_dict(), near.state.gradients.state_dict())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("zeroed", [(0, 1), (1, 2), (0, 2)])
def test_gradients_of_which_one_optimizer_zeroes_some_are_put_back_and_sent(
    zeroed: tuple[int, int], at_end: bool, to_none: bool
) -> None:
    """Two optimizers train one model: one steps in every block, the other one less often."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    script = Script(model=net)
    often = [net[i].weight for i in zeroed]
    (kept,) = (p for p in net.parameters() if all(p is not o for o in often))

    def zero() -> None:
        torch.optim.SGD(often).zero_grad(set_to_none=to_none)  # type: ignore[arg-type]

    def block() -> None:
        script.undo.begin()
        if not at_end:
            zero()
        script.undo.before_backward()
        accumulate(net)()
        script.reduce()
        if at_end:
            zero()

    for index in range(1, 5):
        block()
        script.end()
        if index > 1:
            given = script.state.gradients.state_dict()["gradients"]["model"]
            name = next(n for n, p in net.named_parameters() if p is kept)
            assert given[name].flatten()[0] == 0.25 * index
    before = grads(net)
    block()
    assert script.undo.put_back()
    assert grads(net) == before


def test_gradients_zeroed_below_a_void_block_are_put_back() -> None:
    net, script = tracking(4)
    for _ in range(3):
        accumulated(script, net, zero=False)
    before = grads(net)
    lost(script, net, zero=False)
    script.undo.keep_for_retry()
    net.zero_grad()
    script.undo.put_back_for_retry()
    assert grads(net) == before


def test_gradients_zeroed_in_place_count_as_leftover() -> None:
    net, script = tracking(4)
    accumulated(script, net, zero=True)
    script.undo.begin()
    for parameter in net.parameters():
        parameter.grad.zero_()  # type: ignore[union-attr]
    script.undo.before_backward()
    assert script.state.gradients.state_dict()["gradients"] == {}


def test_gradients_received_from_another_member_replace_those_of_the_receiver() -> None:
    source, target = layer(4), layer(4)
    left, right = Script(model=source), Script(model=target)
    for _ in range(2):
        accumulated(left, source, zero=False)
    gradients(target)
    right.state.gradients.load_state_dict(copy.deepcopy(left.state.gradients.state_dict()))
    assert grads(target) == grads(source)
    lost(right, target, zero=False)


def test_gradients_of_many_that_begin_to_grow_are_noticed_at_once() -> None:
    """Each block looks at some in turn as long as none grows."""
    net = nn.Sequential(*(layer(4) for _ in range(40)))
    script = Script(model=net)
    for _ in range(20):
        accumulated(script, net, zero=True)
    accumulating(script, net, zero=False)
    assert not script.undo.put_back()  # seen, but not copied
    for _ in range(2):
        accumulated(script, net, zero=False)
    lost(script, net, zero=False)


def test_gradients_of_a_few_among_many_are_kept_if_the_script_has_accumulated_them() -> None:
    net = nn.Sequential(*(layer(4) for _ in range(40)))
    script = Script(model=net)
    few = net[17]
    for _ in range(20):
        script.block()  # without any gradients
    accumulate(few)()
    for _ in range(8):
        accumulated(script, few, zero=False)
    lost(script, few, zero=False)


@pytest.mark.parametrize("phase", range(6))
def test_gradients_of_a_head_that_begin_to_grow_are_not_dropped_without_notice(phase: int) -> None:
    """Of 80 parameters two have gradients: the script trains only a head."""
    net = nn.Sequential(*(layer(4) for _ in range(40)))
    head, script = net[17], Script(model=net)
    for _ in range(40 + phase):
        accumulated(script, head, zero=True)
    for _ in range(2):
        accumulated(script, head, zero=False)
    lost(script, head, zero=False)
