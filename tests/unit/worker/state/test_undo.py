"""Whatever a script does in a block that is given up is undone exactly, or is said not to be."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.errors import ConfigurationError
from elastic.worker.optimizers import Optimizers
from elastic.worker.state import cells
from elastic.worker.state.cells import NumpyGenerator, PythonGenerator, TorchGenerator, cells_of
from elastic.worker.state.job_state import JobState
from elastic.worker.state.undo import Undo
from tests.unit.worker.around_optimizer import Lookahead
from tests.unit.worker.trees import same

CPU = torch.device("cpu")
WIDE = 160  # a square layer of it is large: worth being learned about
LEARNT = 20  # blocks after which nothing is being learned for a while
Action = Callable[[], Any]


def nothing() -> None:
    """An action that changes nothing."""


class Script:
    """Tracked objects, and blocks that change them before and after their last collective."""

    def __init__(self, **tracked: Any) -> None:
        self.state = JobState()
        self.state.track(tracked)
        self.collectives = 0
        self.told: list[tuple[list[str], int]] = []
        self.copying_s: list[float] = []
        self.optimizers = Optimizers(self.state)
        self.undo = Undo(
            self.state,
            device=CPU,
            wait_for_device=nothing,
            on_costly=self.costly,
        )
        for optimizer in self.state.optimizers():
            optimizer.register_step_post_hook(lambda o, *_: self.optimizers.stepped(o))

    def costly(self, names: list[str], size: int, copy_s: float) -> None:
        self.told.append((names, size))
        self.copying_s.append(copy_s)

    def reduce(self) -> None:
        """A backward pass that averages."""
        self.collectives += 1
        self.undo.reduced(self.collectives)

    def end(self) -> None:
        """The block ends well."""
        later = self.undo.collectives_since_reduction(self.collectives)
        self.undo.end(collectives_since_reduction=later)

    def block(self, before: Action = nothing, after: Action = nothing) -> None:
        """A step that counts."""
        self.undo.begin()
        before()
        self.reduce()
        after()
        self.end()

    def lost(self, before: Action = nothing, after: Action = nothing) -> bool:
        """A block that is given up. Returns whether it was undone; if so, asserts that it was."""
        self.undo.begin()
        at_begin = self.everything()
        before()
        if after is not nothing:
            self.reduce()
            after()
        undone = self.undo.put_back()
        if undone:
            assert same(self.everything(), at_begin)
        return undone

    def below_void_block(self, change: Action) -> None:
        """What the script does below a block that does not count; asserts that it is undone."""
        at_begin = self.everything()
        self.undo.keep_for_retry()
        change()
        assert not same(self.everything(), at_begin)
        self.undo.put_back_for_retry()
        assert same(self.everything(), at_begin)

    def learn(self, before: Action = nothing, after: Action = nothing) -> None:
        """So many blocks that nothing is copied any more only to learn from it."""
        for _ in range(LEARNT):
            self.block(before, after)

    def everything(self) -> Any:
        """All that is tracked, as values, and what a state_dict leaves out."""
        found = {
            name: copy.deepcopy(item.state_dict()) for name, item in self.state.everything.items()
        }
        flags = {n: [p.requires_grad for p in m.parameters()] for n, m in modules(self.state)}
        modes = {n: [each.training for each in m.modules()] for n, m in modules(self.state)}
        return found, flags, modes


def modules(state: JobState) -> list[tuple[str, nn.Module]]:
    return list(state.modules().items())


def layer(width: int = WIDE) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, width)


def tracking(width: int = WIDE) -> tuple[nn.Linear, Script]:
    """A layer, and a script that tracks it as its model."""
    net = layer(width)
    return net, Script(model=net)


def learnt() -> tuple[nn.Linear, Script]:
    """The same with a script that has learnt that no block changes it."""
    net, script = tracking()
    script.learn()
    return net, script


def trained(
    kind: type[torch.optim.Optimizer], width: int = WIDE, **options: Any
) -> tuple[nn.Linear, torch.optim.Optimizer, Script]:
    """A layer, the optimizer that trains it, and a script that tracks both."""
    net = layer(width)
    optimizer = kind(net.parameters(), **{"lr": 0.1, **options})  # type: ignore[call-arg]
    return net, optimizer, Script(model=net, optimizer=optimizer)


def scheduled() -> tuple[nn.Linear, Script, Action]:
    """The same with a scheduler, and what the script does below its blocks."""
    net, optimizer, script = trained(torch.optim.SGD, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    script.state.track({"scheduler": scheduler})
    return net, script, both(scheduler.step, write_data(net))


def add(module: nn.Module, amount: float = 0.5) -> Action:
    def change() -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(amount)

    return change


def write_data(module: nn.Module) -> Action:
    """Through `.data`, which moves no version counter."""

    def change() -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.99).add_(0.01)

    return change


def gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)


def step_of(optimizer: torch.optim.Optimizer, *of: nn.Module) -> Action:
    def change() -> None:
        for module in of:
            gradients(module)
        optimizer.step()
        optimizer.zero_grad()

    return change


def both(*actions: Action) -> Action:
    def change() -> None:
        for action in actions:
            action()

    return change


@pytest.fixture(params=[4, WIDE], ids=["small", "large"])
def net(request: pytest.FixtureRequest) -> nn.Linear:
    return layer(request.param)


# ---- styles of training, each lost in a first block and in one after all was learnt


STYLES: dict[str, Callable[[nn.Linear], tuple[dict[str, Any], Action, Action]]] = {}


def style(
    make: Callable[[nn.Linear], tuple[dict[str, Any], Action, Action]],
) -> Callable[[nn.Linear], tuple[dict[str, Any], Action, Action]]:
    """make: what is tracked, what is done before the last collective, and what after it."""
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
    return {"model": nn.Sequential(net, nn.Dropout())}, lambda: net.train(not net.training), nothing


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
    """Keeps more than rates in its groups, as apex' and some published optimizers do, and more
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
    """Tracked by the values in it."""

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


@pytest.mark.parametrize("name", STYLES)
def test_a_habit_is_undone_in_each_of_the_first_blocks(name: str, net: nn.Linear) -> None:
    """This includes the first block that is not copied to learn from it."""
    tracked, before, after = STYLES[name](net)
    script = Script(**tracked)
    for _ in range(9):
        script.block(before, after)
        assert script.lost(before)


@pytest.mark.parametrize("name", STYLES)
def test_a_retried_block_ends_as_if_it_had_been_the_first(name: str) -> None:
    """Bit for bit: with a loss at every block, and without any."""
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


def test_default_generators_are_put_back() -> None:
    script = Script(model=layer(2))
    script.undo.begin()
    drawn = torch.rand(2)
    assert script.undo.put_back()
    assert torch.equal(torch.rand(2), drawn)


def test_a_generator_made_in_the_block_begins_anew_in_the_retry() -> None:
    script = Script(model=layer(2))
    script.block()
    script.undo.begin()
    noise = TorchGenerator(torch.Generator().manual_seed(1))
    script.state.track_own("session.generator.noise", noise)
    drawn = torch.rand(2, generator=noise.generator)
    assert script.undo.put_back()
    assert torch.equal(torch.rand(2, generator=noise.generator), drawn)
    script.block()
    assert not torch.equal(torch.rand(2, generator=noise.generator), drawn)


# ---- AMP


@pytest.mark.parametrize("stage", ["unscaled", "stepped", "updated"])
@pytest.mark.parametrize("after_updates", [0, 2])
def test_the_stage_of_a_gradscaler_is_put_back(stage: str, after_updates: int) -> None:
    """If not, unscale_() raises in the retry on every survivor."""
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


# ---- optimizers


def test_state_that_an_optimizer_has_made_in_the_block_is_taken_away_again() -> None:
    net, optimizer, script = trained(torch.optim.Adam, 4)
    assert script.lost(step_of(optimizer, net))
    assert len(optimizer.state) == 0


def test_the_tensors_of_an_optimizers_state_stay_the_same_objects() -> None:
    net, optimizer, script = trained(torch.optim.Adam, 4)
    script.block(after=step_of(optimizer, net))
    moment = optimizer.state[net.weight]["exp_avg"]
    assert script.lost(step_of(optimizer, net))
    assert optimizer.state[net.weight]["exp_avg"] is moment


def test_a_parameter_group_added_in_the_block_is_taken_away_again() -> None:
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


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    """Captured graphs read it."""
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


# ---- gradients that outlive a step


def accumulate(net: nn.Module) -> Action:
    def backward() -> None:
        for parameter in net.parameters():
            grown = torch.full_like(parameter, 0.25)
            parameter.grad = grown if parameter.grad is None else parameter.grad.add_(grown)

    return backward


def grads(net: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.flatten()[0].item() for p in net.parameters()]


def accumulating(script: Script, net: nn.Module, *, zero: bool) -> None:
    """A block in which gradients grow by hand; they are zeroed before or not."""
    script.undo.begin()
    if zero:
        for parameter in net.parameters():
            parameter.grad = None
    script.undo.before_backward()
    accumulate(net)()
    script.reduce()


def accumulated(script: Script, net: nn.Module, *, zero: bool) -> None:
    """Such a block that ends well."""
    accumulating(script, net, zero=zero)
    script.end()


def test_gradients_accumulated_by_hand_are_put_back() -> None:
    net, script = tracking(4)
    for _ in range(2):
        accumulated(script, net, zero=False)
    assert grads(net) == [0.5, 0.5]
    accumulating(script, net, zero=False)
    assert script.undo.put_back()
    assert grads(net) == [0.5, 0.5]


def test_gradients_that_grow_are_given_to_newcomers_and_left_over_ones_are_not() -> None:
    net, script = tracking(4)
    for zero, expected in ((True, 0), (False, 2)):
        for _ in range(3):
            accumulated(script, net, zero=zero)
        given = script.state.gradients.state_dict()["gradients"]
        assert len(given.get("model", {})) == expected


def test_sparse_gradients_that_are_left_over_or_grow_are_taken_over() -> None:
    """A script that zeroes them at the top of a block has them at the end of each block."""

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
            left.end()  # refuses what could not be given to others
        given = left.state.gradients.state_dict()
        assert len(given["gradients"].get("words", {})) == expected
        right.state.gradients.load_state_dict(copy.deepcopy(given))
        if expected:
            assert target.weight.grad is not None
            assert same(target.weight.grad.to_dense(), source.weight.grad.to_dense())  # type: ignore[union-attr]


def test_gradients_that_grow_for_once_are_said_not_to_be_put_back() -> None:
    net, script = tracking(4)
    for _ in range(3):
        accumulated(script, net, zero=True)
    accumulating(script, net, zero=False)
    assert not script.undo.put_back()
    for _ in range(2):
        accumulated(script, net, zero=False)
    before = grads(net)
    accumulating(script, net, zero=False)
    assert script.undo.put_back()
    assert grads(net) == before


def test_gradients_zeroed_in_every_fourth_block_are_put_back_and_given_in_all_others() -> None:
    net, script = tracking(4)
    for index in range(12):
        accumulated(script, net, zero=index % 4 == 0)
        before = grads(net)
        assert len(script.state.gradients.state_dict()["gradients"]["model"]) == 2
        accumulating(script, net, zero=(index + 1) % 4 == 0)
        assert script.undo.put_back()
        assert grads(net) == before


def test_what_a_given_up_block_found_out_about_gradients_is_forgotten() -> None:
    """Members that did not come as far write another share of the same checkpoint."""
    net, other = layer(4), layer(4)
    far, near = Script(model=net), Script(model=other)
    for script, module in ((far, net), (near, other)):
        accumulated(script, module, zero=True)
    accumulating(far, net, zero=True)
    near.undo.begin()
    assert far.undo.put_back()
    assert near.undo.put_back()
    assert same(far.state.gradients.state_dict(), near.state.gradients.state_dict())


def test_gradients_zeroed_below_a_void_block_are_put_back() -> None:
    net, script = tracking(4)
    for _ in range(3):
        accumulated(script, net, zero=False)
    before = grads(net)
    accumulating(script, net, zero=False)
    assert script.undo.put_back()
    script.undo.keep_for_retry()
    net.zero_grad()
    script.undo.put_back_for_retry()
    assert grads(net) == before


def test_gradients_zeroed_in_place_are_left_over() -> None:
    net, script = tracking(4)
    accumulated(script, net, zero=True)
    script.undo.begin()
    for parameter in net.parameters():
        parameter.grad.zero_()  # type: ignore[union-attr]
    script.undo.before_backward()
    assert script.state.gradients.state_dict()["gradients"] == {}


def test_another_members_gradients_are_taken_over() -> None:
    source, target = layer(4), layer(4)
    left, right = Script(model=source), Script(model=target)
    for _ in range(2):
        accumulated(left, source, zero=False)
    gradients(target)
    right.state.gradients.load_state_dict(copy.deepcopy(left.state.gradients.state_dict()))
    assert grads(target) == grads(source)
    accumulating(right, target, zero=False)
    assert right.undo.put_back()
    assert grads(target) == grads(source)


# ---- learning


def test_what_changes_after_the_last_collective_alone_is_not_copied() -> None:
    net, optimizer, script = trained(torch.optim.AdamW)
    script.learn(after=step_of(optimizer, net))
    assert script.told == []
    assert script.lost()


@pytest.mark.parametrize(("kind", "copies"), [("SGD", 2), ("Adam", 3)])
def test_a_costly_copy_is_told_of_once_with_names_and_size(kind: str, copies: int) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    net, optimizer, script = trained(getattr(torch.optim, kind), 600, **options)
    script.learn(step_of(optimizer, net))
    parameters = sum(p.numel() * 4 for p in net.parameters())
    ((names, size),) = script.told
    assert names == ["model", "optimizer"]
    assert copies * parameters <= size <= copies * parameters + 8  # Adam counts its steps, too
    assert 0 < script.copying_s[0] < 10


def test_a_collective_after_the_optimizers_step_is_learnt_from() -> None:
    """It begins unknown to the session; the group's counter tells of it."""
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)

    def log_the_loss() -> None:
        script.collectives += 1

    after = both(step_of(optimizer, net), log_the_loss)
    script.learn(after=after)
    assert script.lost(after=after)


@pytest.mark.parametrize("change", ["in place", "fused", "data"])
def test_a_change_that_was_never_seen_before_is_not_undone_and_that_is_said(change: str) -> None:
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)
    script.learn(after=step_of(optimizer, net))
    changes = {
        "in place": add(net),
        "fused": step_of(optimizer, net),
        "data": lambda: setattr(net.weight, "data", net.weight.data + 1.0),
    }
    assert not script.lost(changes[change])


@pytest.mark.parametrize("place", ["before the reduction", "after it"])
def test_what_a_fused_optimizer_trains_is_put_back_with_its_state(place: str) -> None:
    """Its steps move no version of the parameters, and these come before a collective only now and
    then, in no block that is learned from: as where every hundredth step averages its loss."""
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)
    step = step_of(optimizer, net)
    first = place == "before the reduction"
    seldom = (step, nothing) if first else (nothing, both(step, script.reduce))
    script.learn(nothing, step)
    assert not script.lost(*seldom)
    script.block(*seldom)
    script.block(nothing, step)
    assert script.lost(*seldom)


def test_a_large_buffer_that_is_assigned_anew_now_and_then_is_put_back() -> None:
    net = layer()
    net.register_buffer("queue", torch.zeros(WIDE, WIDE))

    def assign() -> None:
        net.queue = torch.roll(net.queue, 1) + 0.5  # type: ignore[arg-type]

    script = Script(model=net)
    script.learn()
    script.block(assign)
    script.block()
    assert script.lost(assign)


def test_a_parameter_that_is_taken_away_for_good_is_refused() -> None:
    net, script = tracking()
    script.block()
    prune.l1_unstructured(net, "weight", amount=0.3)
    with pytest.raises(ConfigurationError, match=r"model has lost .* \(weight, as by pruning"):
        script.block()


# ---- session.state: what is in it may also be held by the script


def test_what_a_script_holds_of_its_values_is_put_back_and_stays_in_them() -> None:
    script = Script(model=layer(4))
    values = script.state.values
    losses = values.setdefault("losses", [])
    center = values.setdefault("center", torch.zeros(2))
    seen = values.setdefault("by class", {"seen": {1}, "counts": np.zeros(2)})["seen"]
    values["pair"] = ([], 1)

    def change() -> None:
        losses.append(0.5)
        center.add_(1.0)
        seen.add(2)
        values["by class"]["counts"] += 1
        values["pair"][0].append(1)

    for _ in range(2):
        assert script.lost(change)
        script.block(change)
    assert (values["losses"], values["by class"]["seen"]) == ([0.5, 0.5], {1, 2})
    assert values["losses"] is losses
    assert values["center"] is center
    assert center.tolist() == [2.0, 2.0]
    assert values["pair"] == ([1, 1], 1)


def test_another_object_that_is_put_among_the_values_keeps_its_content() -> None:
    net, script = tracking(4)
    constant = ["warm", "full"]
    script.state.values.update(phases=["none"], center=torch.zeros(4, 4))

    def change() -> None:
        script.state.values["phases"] = constant
        script.state.values["center"] = net.weight.data

    assert script.lost(change)
    assert constant == ["warm", "full"]
    assert bool(net.weight.any())


def test_another_members_values_fill_what_the_script_holds_already() -> None:
    state = JobState()
    losses = state.values.setdefault("losses", [9.0, [1]])
    inner = losses[1]
    center = state.values.setdefault("center", torch.zeros(2))
    counts = state.values.setdefault("counts", {"a": np.zeros(2), "b": {3}})
    state.values["gone"] = 1
    state.values.load_state_dict(
        {
            "new": [1],
            "losses": [0.5, [2, 3], 7],
            "center": torch.ones(2),
            "counts": {"b": {4}, "a": np.ones(2)},
        }
    )
    assert list(state.values) == ["new", "losses", "center", "counts"]
    assert losses == [0.5, [2, 3], 7]
    assert state.values["losses"] is losses
    assert losses[1] is inner
    assert center.tolist() == [1.0, 1.0]
    assert list(counts) == ["b", "a"]
    assert counts["a"].tolist() == [1.0, 1.0]
    assert state.values["counts"] is counts


def test_two_places_that_shared_an_object_here_may_differ_there() -> None:
    state = JobState()
    both_hold, tensor = [1], torch.zeros(2, 2)
    state.values.update(a=both_hold, b=both_hold, whole=tensor, row=tensor[0])
    content = {"a": [2], "b": [3], "whole": torch.ones(2, 2), "row": torch.full((2,), 5.0)}
    state.values.load_state_dict(copy.deepcopy(content))
    assert same(state.values.state_dict(), content)


class LargeCopies(TorchDispatchMode):
    """Counts the large tensors that are copied within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.aten.clone.default and args[0].numel() >= WIDE * WIDE:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_weights_that_come_into_the_scripts_values_late_are_soon_copied_no_more() -> None:
    script = Script(net=layer(2))
    script.learn()
    best = torch.zeros(WIDE, WIDE)
    script.state.values["best"] = best
    script.learn()
    script.learn()
    with LargeCopies() as copies:
        for _ in range(3):
            script.block()
    assert copies.count == 0
    script.learn(lambda: best.add_(1))
    assert script.lost(lambda: best.add_(1))


class Shadow:
    """Keeps what it is given."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensors = state_dict["tensors"]


@pytest.mark.parametrize("width", [2, WIDE], ids=["small", "large"])
def test_tensors_that_share_memory_still_do_when_they_are_put_back(width: int) -> None:
    tied = torch.zeros(width, width)
    shadow = Shadow({"read": tied, "write": tied.detach()})
    script = Script(shadow=shadow)
    assert script.lost(lambda: tied.add_(1))
    shadow.tensors["read"].fill_(7.0)
    assert bool((shadow.tensors["write"] == 7.0).all())


def test_objects_in_a_tuple_of_the_scripts_values_stay_the_same_objects() -> None:
    state = JobState()
    losses, center = [1.0], torch.zeros(2)
    state.values["both"] = pair = (losses, center, "name")
    state.values.load_state_dict({"both": ([1.0, 2.0], torch.ones(2), "name")})
    assert state.values["both"] is pair
    assert losses == [1.0, 2.0]
    assert center.tolist() == [1.0, 1.0]
    state.values.load_state_dict({"both": ([3.0], torch.ones(2), "another")})
    assert state.values["both"][0] is losses
    assert losses == [3.0]
    assert state.values["both"][2] == "another"


class Nested:
    """Keeps its tensor in an object of its own."""

    def __init__(self) -> None:
        self.inner = Holder()

    def change(self) -> None:
        self.inner.tensor.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.inner.tensor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.tensor.copy_(state_dict["tensor"])


class Holder:
    """Without a __dict__."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor = torch.zeros(WIDE, WIDE)


class SecondOfTwo(Nested):
    """Changes the second tensor of a dictionary."""

    def __init__(self) -> None:
        self.tensors = {"first": torch.zeros(2), "second": torch.zeros(WIDE, WIDE)}

    def change(self) -> None:
        self.tensors["second"].add_(1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in state_dict.items():
            self.tensors[name].copy_(tensor)


class Various(Holder):
    """Changes, beside a large tensor, what counts no versions."""

    __slots__ = ("bank", "moments", "phase", "recent", "seen", "sizes", "sums")

    def __init__(self) -> None:
        self.bank = torch.zeros(WIDE, WIDE)
        super().__init__()
        self.seen: set[int] = set()
        self.recent = deque([0.5])
        self.sums = np.zeros(3)
        self.sizes = dict.fromkeys(range(100), 0)
        self.moments = 1 + 1j
        self.phase = b"warm"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "tensor": self.tensor,
            "recent": list(self.recent),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """No test looks at what is put back."""


@pytest.mark.parametrize("name", [*Various.__slots__, "tensor"])
def test_a_first_change_of_any_kind_is_said_not_to_be_undone(name: str) -> None:
    changes: dict[str, Callable[[Various], Any]] = {
        "bank": lambda o: o.bank.add_(1),
        "tensor": lambda o: o.tensor.add_(1),
        "seen": lambda o: o.seen.add(3),
        "recent": lambda o: o.recent.append(0.25),
        "sums": lambda o: o.sums.__iadd__(1),
        "sizes": lambda o: o.sizes.update({50: 1}),
        "moments": lambda o: setattr(o, "moments", 2j),
        "phase": lambda o: setattr(o, "phase", b"full"),
    }
    item = Various()
    script = Script(item=item)
    script.learn()
    assert not script.lost(lambda: changes[name](item))


class Target(Nested):
    """Keeps a module, as a target network or an average written by hand does."""

    def __init__(self) -> None:
        self.module = layer()

    def change(self) -> None:
        add(self.module)()

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict)


class OneOfMany(SecondOfTwo):
    """Changes one tensor in the middle of a longer dictionary: of each class its prototype."""

    def __init__(self) -> None:
        self.tensors = {str(number): torch.zeros(WIDE, WIDE) for number in range(40)}

    def change(self) -> None:
        self.tensors["7"].add_(1)


class OneOfManyPairs(OneOfMany):
    """The same with a count beside each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [(tensor, 0) for tensor in self.tensors.values()]
        self.state_dict = self.tensors.copy  # type: ignore[method-assign]
        del self.tensors

    def change(self) -> None:
        self.pairs[7][0].add_(1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for (tensor, _), saved in zip(self.pairs, state_dict.values(), strict=True):
            tensor.copy_(saved)


def test_an_object_that_refers_to_a_tracked_model_does_not_change_with_it() -> None:
    class Average(Nested):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    net = layer()
    script = Script(average=Average(net), model=net)
    script.learn()
    script.block(add(net))
    script.undo.begin()
    assert [c.name for i, c in enumerate(script.undo._large) if i in script.undo._begin.large] == [
        "model"
    ]


def test_a_module_that_a_tracked_object_has_replaced_is_not_kept() -> None:
    target = Target()
    script = Script(target=target)
    script.learn()
    replaced = []
    for _ in range(6):
        replaced.append(weakref.ref(target.module))
        target.module = copy.deepcopy(target.module)
        script.block()
    gc.collect()
    assert sum(module() is not None for module in replaced) <= 2


def test_a_module_in_a_tracked_object_may_have_a_sparse_buffer_and_a_lazy_parameter() -> None:
    target = Target()
    target.module.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
    target.lazy = nn.LazyLinear(2)  # type: ignore[attr-defined]
    script = Script(target=target)
    script.learn()
    assert not script.lost(target.change)


def test_a_first_change_beside_a_tracked_module_in_an_object_is_said_not_to_be_undone() -> None:
    target, shared, head = Target(), layer(), layer()
    target.module = nn.Sequential(shared, head)  # type: ignore[assignment]
    script = Script(target=target, model=shared)
    script.learn()
    assert not script.lost(add(head))


@pytest.mark.parametrize("kind", [Nested, SecondOfTwo, Target, OneOfMany, OneOfManyPairs])
def test_a_first_change_deep_inside_of_an_object_is_said_not_to_be_undone(
    kind: type[Nested],
) -> None:
    item = kind()
    script = Script(item=item)
    script.learn()
    assert not script.lost(item.change)


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_buffer_made_in_inference_mode_is_put_back(seen_before: bool) -> None:
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


def test_a_value_that_others_cannot_be_given_is_refused_before_a_group_is_lost() -> None:
    script = Script(model=layer(4))
    script.block()
    script.state.values["recent"] = deque([1.0])
    with pytest.raises(ConfigurationError, match=r"session\.state\.recent"):
        script.learn()


def test_a_change_seen_once_is_undone_from_the_next_block_on() -> None:
    net, script = learnt()
    script.block(add(net))
    assert script.lost(add(net))


def test_a_surprise_is_forgotten_with_the_block_that_counted() -> None:
    net, script = learnt()
    assert not script.lost(add(net), nothing)
    script.block(add(net))
    assert script.lost(add(net))


def test_a_change_that_no_sign_shows_is_learnt_about_later() -> None:
    """Writes through `.data` that begin in mid-run show in the next block that is compared."""
    net, script = learnt()
    for _ in range(16):
        script.block(write_data(net))
    assert script.lost(write_data(net))


def test_what_is_tracked_later_is_learnt_about_from_its_first_block() -> None:
    net, late = layer(), layer()
    script = Script(model=net)
    script.learn(add(net))
    script.state.track({"late": late})
    assert script.lost(write_data(late))
    script.learn(both(add(net), write_data(late)))
    assert script.lost(both(add(net), write_data(late)))


def test_after_many_blocks_it_learns_again() -> None:
    net, script = tracking()
    for _ in range(512):
        script.block()
    assert script.lost(write_data(net))


# ---- between blocks: the commit mark


def as_of_commit(script: Script) -> Any:
    with script.undo.as_of_commit():
        return script.everything()


@pytest.mark.parametrize("learnt", [False, True])
def test_the_state_of_the_last_commit_can_be_had_after_the_script_changed_it(learnt: bool) -> None:
    _, script, gap = scheduled()
    for _ in range(LEARNT if learnt else 1):
        script.block()
        committed = script.everything()
        assert script.undo.holds_commit
        assert not script.undo.changed_since_commit()
        gap()
        assert script.undo.changed_since_commit()
        now = script.everything()
        assert same(as_of_commit(script), committed)
        assert same(script.everything(), now)
        script.undo.begin()
        script.undo.put_back()
        assert script.undo.holds_commit
        assert same(as_of_commit(script), committed)


def test_the_commit_mark_survives_a_block_that_was_given_up() -> None:
    net, script = tracking()
    script.learn(add(net))
    committed = script.everything()
    assert script.lost(add(net))
    assert not script.undo.changed_since_commit()
    assert same(as_of_commit(script), committed)


def test_there_is_no_commit_mark_when_a_change_between_blocks_came_as_a_surprise() -> None:
    net, script = learnt()
    add(net)()
    script.undo.begin()
    assert not script.undo.holds_commit
    assert script.undo.put_back()
    script.block()
    committed = script.everything()
    add(net)()
    script.undo.begin()
    assert script.undo.holds_commit
    assert same(as_of_commit(script), committed)


def test_there_is_no_commit_mark_as_soon_as_a_surprise_is_there() -> None:
    """The group may be lost at the boundary, before the next block begins."""
    net, script = learnt()
    assert script.undo.holds_commit
    add(net)()
    assert not script.undo.holds_commit


def test_putting_back_is_no_change_between_blocks() -> None:
    net, script = tracking()
    script.learn(add(net))
    assert script.lost(add(net))
    script.undo.keep_for_retry()
    add(net)()
    script.undo.put_back_for_retry()
    assert script.undo.holds_commit
    script.undo.begin()
    assert script.undo.holds_commit
    script.block(add(net))
    add(net)()
    assert not script.undo.holds_commit  # nothing is copied at commits


def test_going_back_to_an_earlier_state_between_blocks_is_seen_in_the_optimizer_too() -> None:
    net, optimizer, script = trained(torch.optim.SGD, momentum=0.9)
    step = step_of(optimizer, net)
    script.learn(after=step)
    best = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    for _ in range(3):
        script.block(after=step)
        committed = script.everything()
        net.load_state_dict(best[0])
        optimizer.load_state_dict(copy.deepcopy(best[1]))
        if script.undo.holds_commit:
            assert same(as_of_commit(script), committed)
        script.undo.begin()
        script.undo.put_back()
    assert script.undo.holds_commit


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("width", [4, WIDE])
@pytest.mark.parametrize("fused", [False, True])
def test_what_an_optimizer_around_another_one_says_is_its_state_is_undone(
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


def test_a_received_state_is_of_the_mark_that_it_was_sent_as() -> None:
    net, script = learnt()
    for at_commit in (False, True):
        script.undo.begin()
        script.undo.put_back()
        add(net)()
        script.undo.received(at_commit=at_commit)
        assert script.undo.holds_commit is at_commit


# ---- below a block that does not count


def test_what_is_changed_for_the_first_time_below_a_void_block_is_undone() -> None:
    net, script = learnt()
    assert script.lost()
    script.below_void_block(write_data(net))


def test_what_stands_below_a_void_block_is_undone_when_it_is_handed_out_again() -> None:
    net, script, gap = scheduled()
    for _ in range(LEARNT):
        script.block(add(net))
        gap()
    assert script.lost(add(net))
    script.below_void_block(gap)
    at_begin = script.everything()
    gap()
    script.undo.put_back_for_retry()  # nothing is kept twice
    assert not same(script.everything(), at_begin)


@pytest.mark.parametrize("optimizer", ["net", "average"])
def test_a_fused_step_below_a_void_block_is_undone(optimizer: str) -> None:
    net, average = layer(), layer()
    module = {"net": net, "average": average}[optimizer]
    fused = torch.optim.Adam(module.parameters(), fused=True)
    script = Script(net=net, average=average, optimizer=fused)
    gradients(module)
    script.learn(after=fused.step)
    assert script.lost()
    script.below_void_block(both(lambda: gradients(module), fused.step))


def test_copies_made_ahead_serve_the_retry() -> None:
    net, script = learnt()
    assert script.lost()
    script.undo.keep_ahead()
    script.below_void_block(add(net))


def test_copies_made_ahead_of_another_members_state_are_forgotten() -> None:
    net, script = learnt()
    assert script.lost()
    script.undo.keep_ahead()
    add(net)()  # what is received
    script.undo.received(at_commit=False)
    script.below_void_block(add(net))


# ---- cells


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


def test_a_buffer_that_is_taken_away_in_the_block_comes_back() -> None:
    net = layer()
    net.register_buffer("cache", torch.ones(WIDE, WIDE))
    script = Script(model=net)
    assert script.lost(lambda: setattr(net, "cache", None))
    script.learn()
    assert not script.lost(lambda: setattr(net, "cache", None))  # never seen in a block


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
def test_a_module_knows_that_a_cache_that_grew_in_the_block_is_short_again(
    long: int,
) -> None:
    net = nn.Sequential(Rotary(long))
    script = Script(net=net)
    assert script.lost(lambda: net[0](torch.ones(1, 2), long + 1))
    assert net[0].longest == len(net[0].cos) == long
    net[0](torch.ones(1, 2), long + 1)
    calls = net[0].calls
    assert script.lost(lambda: net[0](torch.ones(1, 2), long + 1))
    assert net[0].longest == len(net[0].cos) == long + 1
    assert net[0].calls == calls + 1  # what a module counts is its own


class Stretched(nn.Module):
    """Computes other frequencies, as many, when a longer sequence comes."""

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


def test_a_module_knows_what_its_frequencies_are_for_when_they_were_made_in_the_block() -> None:
    net = Stretched()
    script = Script(net=net)
    assert script.lost(lambda: net(torch.ones(1, 2), 9))
    assert net.longest == 4
    net(torch.ones(1, 2), 9)  # once more, in the new group
    assert torch.equal(net.inverse, torch.ones(3) / 9)


def test_a_buffer_that_is_filled_in_the_block_is_empty_again() -> None:
    """A first forward pass may make such a cache."""
    net = layer(4)
    net.register_buffer("cache", None)
    script = Script(model=net)
    assert script.lost(lambda: setattr(net, "cache", torch.ones(2)))
    assert net.cache is None


# ---- anything, in any order


LARGE_FROM_6000_BYTES = mock.patch.object(
    cells, "SMALL_BYTES", 6000
)  # else each example takes long


class World:
    """Objects of every kind, small and large, and what may be done to them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(layer(40), nn.BatchNorm1d(40))
        self.net.register_buffer("count", torch.zeros(1))
        self.other = layer(40)
        self.small = layer(3)
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=0.1, fused=True)
        self.sgd = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        self.sgd._opt_called = True  # type: ignore[attr-defined]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 2, gamma=0.5)
        self.noise = TorchGenerator(torch.Generator().manual_seed(5))
        self.script = Script(
            net=self.net,
            other=self.other,
            small=self.small,
            adam=self.adam,
            sgd=self.sgd,
            schedule=self.schedule,
            noise=self.noise,
        )
        values = self.script.state.values
        self.operations: list[Action] = [
            step_of(self.adam, self.net),
            step_of(self.sgd, self.other),
            add(self.other),
            add(self.net[0], -0.25),
            write_data(self.small),
            self.schedule.step,
            lambda: self.net(torch.ones(2, 40)).sum(),
            lambda: setattr(self.net, "count", self.net.count + 1),
            lambda: torch.rand(2, generator=self.noise.generator),
            lambda: values.__setitem__("best", values.get("best", 0.0) + 1.0),
            lambda: values.pop("best", None),
            lambda: self.small.weight.requires_grad_(not self.small.weight.requires_grad),
            self.assign_data,
        ]
        self._kept: list[torch.Tensor] = []

    def assign_data(self) -> None:
        """The memory before it is kept: assigned twice, it might come back with another content,
        which no sign would show."""
        self._kept.append(self.other.weight.data)
        self.other.weight.data = self.other.weight.data * 0.5

    def act(self, numbers: list[int]) -> Action:
        return both(*(self.operations[n] for n in numbers))


operations = st.lists(st.integers(0, 12), max_size=4)
histories = st.lists(st.tuples(operations, operations, operations), max_size=8)


@settings(max_examples=40, deadline=None)
@given(quiet=st.sampled_from([0, 4]), history=histories, last=operations, late=operations)
def test_any_block_is_undone_exactly_or_said_not_to_be(
    quiet: int, history: list[tuple[list[int], ...]], last: list[int], late: list[int]
) -> None:
    with LARGE_FROM_6000_BYTES:
        world = World()
        for _ in range(quiet):
            world.script.block(world.act([]), world.act([0]))
        for before, after, gap in history:
            undone = world.script.lost(world.act(before), world.act(after))
            if not undone:
                return  # another member's state follows
            world.script.block(world.act(before), world.act(after))
            world.act(gap)()
        world.script.lost(world.act(last), world.act(late) if late else nothing)


@settings(max_examples=30, deadline=None)
@given(habit=st.tuples(operations, operations))
def test_any_habit_is_undone_in_every_block(habit: tuple[list[int], list[int]]) -> None:
    with LARGE_FROM_6000_BYTES:
        world = World()
        before, after = map(world.act, habit)
        for _ in range(9):
            world.script.block(before, after)
            assert world.script.lost(before)


# ---- calls outside of blocks


class Calls:
    """A job that evaluates between two steps, with averaged weights that it swaps in."""

    def __init__(self) -> None:
        self.model, self.average = layer(), layer()
        self.job = Script(model=self.model, average=self.average)
        self.job.learn()
        self.values = self.job.state.values

    def call(self, change: Action, *, lost: bool, place: str = "train.py:9") -> bool:
        """Make it; returns whether it was undone."""
        undo, before = self.job.undo, self.job.everything()
        undo.begin_call(place)
        change()
        if not lost:
            undo.end_call(place)
            return False
        undone = undo.put_back_call()
        if undone:
            assert same(self.job.everything(), before)
        return undone

    def swap_in(self) -> None:
        with torch.no_grad():
            for mine, other in zip(self.model.parameters(), self.average.parameters(), strict=True):
                mine.copy_(other)

    def swap_in_data(self) -> None:
        """As many a hand-written average does; version counters tell nothing of it."""
        for mine, other in zip(self.model.parameters(), self.average.parameters(), strict=True):
            mine.data.copy_(other.data)

    def count(self) -> None:
        self.values["evaluations"] = self.values.get("evaluations", 0) + 1


@pytest.mark.parametrize("change", ["swap_in", "swap_in_data", "count"])
@pytest.mark.parametrize("earlier", [0, 3])
def test_what_a_lost_call_has_changed_is_undone(change: str, earlier: int) -> None:
    calls = Calls()
    for _ in range(earlier):
        calls.call(nothing, lost=False)
        calls.job.undo._calls["train.py:9"].at_s -= 100.0  # they come seldom
    assert calls.call(getattr(calls, change), lost=True)
    assert calls.job.undo.holds_commit, "the signs are those of the commit again"


def test_a_call_that_comes_often_copies_only_what_it_changes() -> None:
    calls = Calls()
    undo = calls.job.undo
    for _ in range(3):
        calls.call(calls.swap_in, lost=False)
    undo._calls["train.py:9"].copy_s = 1000.0
    undo.begin_call("train.py:9")
    assert undo._call is not None
    assert [undo._large[i].name for i in undo._call.large] == ["model"]
    calls.swap_in()
    assert undo.put_back_call()


def test_a_change_that_was_not_expected_of_a_frequent_call_is_not_passed_over() -> None:
    calls = Calls()
    calls.call(nothing, lost=False)
    calls.job.undo._calls["train.py:9"].copy_s = 1000.0
    assert not calls.call(calls.swap_in, lost=True)


@pytest.mark.parametrize("again", ["lost", "for others"])
def test_a_call_above_a_block_that_is_made_again_is_no_change_in_the_block(again: str) -> None:
    net = layer()
    script = Script(net=net)
    script.learn()
    script.undo.begin()
    script.undo.begin_call("here")
    if again == "lost":
        add(net)()
        assert script.undo.put_back_call()
        script.undo.begin_call("here")
    script.undo.end_call("here")
    if again == "for others":
        with script.undo.as_of_call():
            pass
    script.reduce()
    assert script.undo.put_back()
    script.block()
    assert not script.told


class Generators:
    """Tracks its generator at the first use, as `session.generator` does."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generator = torch.Generator().manual_seed(0)

    def track(self) -> None:
        self.script.state.track_own("session.generator.new", TorchGenerator(self.generator))

    def draw(self) -> int:
        return int(torch.randint(10**6, (), generator=self.generator))


@pytest.mark.parametrize("again", ["", "lost", "for others"])
@pytest.mark.parametrize("place", ["above", "below"])
def test_an_object_tracked_for_a_call_disturbs_no_block(place: str, again: str) -> None:
    net = layer()
    script = Script(net=net)
    new = Generators(script)
    if place == "above":
        script.undo.begin()
        before = script.everything()[0]["net"]
    else:
        script.learn(nothing, add(net))
        assert script.lost()
        script.undo.keep_for_retry()
        before = script.everything()[0]["net"]
        add(net)()
    new.track()
    script.undo.begin_call("here")
    first = new.draw()
    if again == "lost":
        assert script.undo.put_back_call()
        script.undo.begin_call("here")
        assert new.draw() == first
    script.undo.end_call("here")
    if again == "for others":
        with script.undo.as_of_call():
            assert new.draw() == first
    if place == "above":
        script.reduce()
        add(net)()
        assert script.undo.put_back()
    else:
        script.undo.put_back_for_retry()
    assert same(script.everything()[0]["net"], before)
    assert new.draw() == first
    script.learn()


def test_a_call_that_is_made_once_more_for_others_leaves_no_trace() -> None:
    calls = Calls()
    first = calls.job.everything()
    calls.call(calls.count, lost=False)
    calls.swap_in()  # below the call
    now = calls.job.everything()
    with calls.job.undo.as_of_call():
        assert same(calls.job.everything(), first)
        calls.count()
    assert same(calls.job.everything(), now)
    calls.job.undo.forget_call()
    assert calls.job.undo._call is None
