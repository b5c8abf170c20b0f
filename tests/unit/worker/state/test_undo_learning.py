"""Undo learns what blocks change and copies only that; it reports a change never seen before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import ConfigurationError
from elastic.worker.state import undo
from elastic.worker.state.cells import Digest, ModuleTensors, OptimizerState
from tests.unit.worker.state.undoing import (
    LEARNT,
    WIDE,
    Action,
    Script,
    add,
    both,
    layer,
    learn_by_digests,
    learnt,
    nothing,
    step_of,
    tracking,
    trained,
    write_data,
)


def test_state_that_changes_only_after_the_last_collective_is_not_copied() -> None:
    net, optimizer, script = trained(torch.optim.AdamW)
    script.learn(after=step_of(optimizer, net))
    assert script.told == []
    assert script.lost()


@pytest.mark.parametrize(("kind", "copies"), [("SGD", 2), ("Adam", 3)])
def test_a_costly_copy_is_reported_once_with_names_and_size(kind: str, copies: int) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    net, optimizer, script = trained(getattr(torch.optim, kind), 600, **options)
    script.learn(step_of(optimizer, net))
    parameters = sum(p.numel() * 4 for p in net.parameters())
    ((names, size),) = script.told
    assert names == ["model", "optimizer"]
    assert copies * parameters <= size <= copies * parameters + 8  # Adam counts its steps, too
    assert 0 < script.copying_s[0] < 10


def test_an_optimizer_step_before_a_later_collective_is_learned_and_undone() -> None:
    """The session does not see this collective begin; the group's counter shows it."""
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)

    def log_the_loss() -> None:
        script.collectives += 1

    after = both(step_of(optimizer, net), log_the_loss)
    script.learn(after=after)
    assert script.lost(after=after)


@pytest.mark.parametrize("change", ["in place", "fused", "data"])
def test_a_change_never_seen_before_is_reported_as_not_undone(change: str) -> None:
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)
    script.learn(after=step_of(optimizer, net))
    changes = {
        "in place": add(net),
        "fused": step_of(optimizer, net),
        "data": lambda: setattr(net.weight, "data", net.weight.data + 1.0),
    }
    assert not script.lost(changes[change])


MANY = 100  # layers: each block looks at some of their tensors


def many() -> tuple[nn.Sequential, torch.optim.Optimizer, Script]:
    net = nn.Sequential(*(layer() for _ in range(MANY)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    script = Script(model=net, optimizer=optimizer)
    script.learn(after=step_of(optimizer, net))
    return net, optimizer, script


def state_of(net: nn.Sequential, optimizer: torch.optim.Optimizer, at: int) -> Action:
    def change() -> None:
        optimizer.state[net[at].weight]["momentum_buffer"].mul_(0.5)

    return change


def test_a_change_of_many_tensors_is_seen_at_once() -> None:
    net, optimizer, script = many()
    assert not script.lost(add(net))
    script.block(add(net), after=step_of(optimizer, net))
    assert script.lost(add(net))


@pytest.mark.parametrize("kind", ["parameter", "parameter below the block", "state"])
def test_a_change_of_one_among_many_tensors_is_seen_in_its_turn(kind: str) -> None:
    net, optimizer, script = many()
    change = state_of(net, optimizer, 58) if kind == "state" else add(net[58])
    below = kind == "parameter below the block"
    for _ in range(36 - LEARNT):
        script.block(after=step_of(optimizer, net))
    for _ in range(27):  # no block that compares the content is among these
        script.block(nothing if below else change, after=step_of(optimizer, net))
        if below:
            change()
    if not below:
        assert script.lost(change)
        return
    script.block(after=step_of(optimizer, net))
    committed = [p.clone() for p in net.parameters()]
    change()
    assert script.undo.holds_commit
    with script.undo.as_of_commit():
        assert all(map(torch.equal, net.parameters(), committed))


@pytest.mark.parametrize("every", [7, 10])
def test_a_change_of_one_among_many_tensors_that_recurs_is_seen_in_the_end(every: int) -> None:
    net = nn.Sequential(*(layer(32) for _ in range(80)))  # parameters in five turns
    script = Script(model=net)
    script.learn()
    for number in range(LEARNT, 400):
        script.block(add(net[33]) if number % every == 0 else nothing)
    assert script.lost(add(net[33]))


def test_a_lost_parameter_is_refused_before_long() -> None:
    net, script = learnt()
    net.bias = None  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="has lost parameters"):
        script.learn()


def test_a_change_seen_once_is_undone_from_the_next_block_on() -> None:
    net, script = learnt()
    script.block(add(net))
    assert script.lost(add(net))


def test_an_unexpected_change_is_undone_once_a_block_that_counts_has_made_it() -> None:
    net, script = learnt()
    assert not script.lost(add(net), nothing)
    script.block(add(net))
    assert script.lost(add(net))


def test_a_change_that_no_sign_shows_is_learned_in_a_later_block() -> None:
    """Writes through `.data` that begin in mid-run show in the next block that is compared."""
    net, script = learnt()
    for _ in range(16):
        script.block(write_data(net))
    assert script.lost(write_data(net))


def test_an_object_that_is_tracked_later_is_learned_about_from_its_first_block() -> None:
    net, late = layer(), layer()
    script = Script(model=net)
    script.learn(add(net))
    script.state.track({"late": late})
    assert script.lost(write_data(late))
    script.learn(both(add(net), write_data(late)))
    assert script.lost(both(add(net), write_data(late)))


def test_learning_is_repeated_after_many_blocks() -> None:
    net, script = tracking()
    for _ in range(512):
        script.block()
    assert script.lost(write_data(net))


@pytest.mark.parametrize(("factor", "blocks"), [(0.0, [0, 1, 2, 4, 8, 16]), (1e9, [0, 1, 2])])
def test_learning_takes_a_small_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch, factor: float, blocks: list[int]
) -> None:
    """The first blocks always learn. Later ones wait until that costs little in comparison."""
    _, script = tracking()
    begun: list[int] = []
    compared: set[int] = set()

    digest = ModuleTensors.digest

    def counted(self: ModuleTensors) -> Digest:
        compared.update(begun[-1:])
        return digest(self)

    learn_by_digests(monkeypatch)
    monkeypatch.setattr(undo, "_LEARNING_FACTOR", factor)
    monkeypatch.setattr(ModuleTensors, "digest", counted)
    for number in range(LEARNT):
        begun.append(number)
        script.undo.begin()
        script.reduce()
        begun.clear()  # the commit prepares for the next block
        script.end()
    assert sorted(compared) == blocks


def test_state_whose_memory_goes_away_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    learn_by_digests(monkeypatch)
    net, script = tracking()
    script.block()
    net.weight = torch.nn.Parameter(torch.empty(WIDE, WIDE, device="meta"))
    script.undo.begin()
    assert not script.undo.holds_commit


def test_much_state_is_learned_about_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    learn_by_digests(monkeypatch)
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)
    for kind in (ModuleTensors, OptimizerState):
        monkeypatch.setattr(kind, "copy", None)
    script.learn(after=step_of(optimizer, net))


def test_the_first_change_to_much_state_is_reported_as_not_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that only the digests show."""
    learn_by_digests(monkeypatch)
    net, script = tracking()
    assert not script.lost(write_data(net))
    assert not script.lost(write_data(net), nothing)
    script.block(write_data(net))
    assert script.lost(write_data(net))


def halve(graph: torch.Tensor) -> None:
    """Change its values: torch puts other memory into one of coordinates."""
    if graph.layout is torch.sparse_coo:
        graph.mul_(0.5)
    else:
        graph.values().mul_(0.5)


def sparse(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    return tensor.float().to_sparse(layout=getattr(torch, kind))


@pytest.mark.parametrize("by_digests", [False, True])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "sparse_csc"])
@pytest.mark.parametrize("change", ["nothing", "another one", "in place", "data"])
@pytest.mark.parametrize("first", ["sparse", "dense", "none"])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
def test_a_graph_that_a_module_does_not_save_is_undone(
    monkeypatch: pytest.MonkeyPatch, kind: str, change: str, first: str, by_digests: bool
) -> None:
    if by_digests:
        learn_by_digests(monkeypatch)
    net = layer()
    graph = sparse(torch.eye(WIDE), kind)
    built = {"sparse": graph, "dense": torch.eye(WIDE), "none": None}[first]
    net.register_buffer("graph", built, persistent=False)
    net.register_buffer("more", torch.zeros(WIDE, WIDE))
    script = Script(model=net)
    script.block()
    net.graph = graph

    changes = {
        "nothing": lambda: None,
        "another one": lambda: setattr(net, "graph", sparse(torch.rand(WIDE, WIDE) > 0.5, kind)),
        "in place": lambda: halve(net.graph),  # type: ignore[arg-type]
        "data": lambda: setattr(net.graph, "data", sparse(torch.rand(WIDE, WIDE) > 0.5, kind)),
    }
    script.learn(changes[change])
    for attempt in range(2):
        before = net.graph
        content = before.to_dense()  # type: ignore[operator]
        assert script.lost(changes[change])
        assert net.graph is before
        assert torch.equal(net.graph.to_dense(), content), attempt  # type: ignore[operator]


class Counted(torch.optim.SGD):
    """Keeps a number for each parameter, beside tensors."""

    def count(self, by: int) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("moment", torch.zeros_like(parameter))
                state["step"] = state.get("step", 0) + by


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("change", ["number", "key", "shape", "dtype", "boundary"])
def test_changes_that_leave_the_bytes_equal_show_in_digests(
    monkeypatch: pytest.MonkeyPatch, change: str, below: bool
) -> None:
    learn_by_digests(monkeypatch)
    net = layer()
    for name in ("one", "other"):
        net.register_buffer(name, torch.ones(WIDE, WIDE))
    net.register_parameter("twin", torch.nn.Parameter(torch.zeros(WIDE, WIDE)))
    optimizer = Counted([net.weight, net.twin], lr=0.1)  # type: ignore[list-item]
    optimizer.count(1)
    script = Script(model=net, optimizer=optimizer)

    def swap_keys() -> None:
        state = optimizer.state
        state[net.bias] = state.pop(net.twin) if net.twin in state else state[net.weight]

    changes = {
        "number": lambda: optimizer.state[net.twin].update(step=7),
        "key": swap_keys,
        "shape": lambda: setattr(net, "one", net.one.view(2, -1)),  # type: ignore[operator]
        "dtype": lambda: setattr(net, "one", net.one.view(torch.int32)),  # type: ignore[operator]
        "boundary": lambda: setattr(net, "one", net.one.resize_(4, 4)),  # type: ignore[operator]
    }
    script.block()
    if not below:
        assert not script.lost(changes[change])
        return
    changes[change]()
    assert not script.undo.holds_commit
    script.undo.begin()
    assert script.undo.put_back()
    assert not script.undo.holds_commit


def test_a_worker_that_joins_takes_over_what_a_member_has_learnt() -> None:
    """It copies at once what blocks change, and nothing else."""
    (net, first), (twin, joins) = tracking(), tracking()
    assert first.undo.learnt() is None
    first.learn(add(net))
    joins.undo.take_over(first.undo.learnt())
    assert joins.lost(add(twin))
    (net, first), (twin, joins) = learnt(), tracking()
    joins.undo.take_over(first.undo.learnt())
    assert not joins.lost(add(twin))


def test_a_worker_that_has_warmed_up_takes_over_what_a_member_has_learnt() -> None:
    (_, first), (twin, joins) = learnt(), tracking()
    assert joins.lost(add(twin))  # as `session.warm_up` does
    joins.undo.take_over(first.undo.learnt())
    assert not joins.lost(add(twin))


def test_a_worker_that_tracks_something_else_learns_by_itself() -> None:
    (_, first), (twin, joins) = learnt(), tracking()
    joins.state.track({"late": layer()})
    joins.undo.take_over(first.undo.learnt())
    assert joins.lost(add(twin))


@pytest.mark.parametrize(
    "values",
    [{str(n): {"n": n} for n in range(10_000)}, np.ones(5_000_000)],
    ids=["dicts", "array"],
)
def test_small_state_that_takes_long_to_copy_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, values: Any
) -> None:
    monkeypatch.setattr(undo, "_SLOW_PART", 0.0)  # a busy machine makes blocks long
    script = Script(model=layer())
    script.state.values["values"] = values
    script.learn()
    assert script.slow == [["session.state"]]


def test_small_state_that_is_quickly_copied_is_not_reported() -> None:
    script = Script(model=layer())
    script.state.values["values"] = list(range(100))
    script.learn()
    assert script.slow == []
