"""Everything that a joining worker needs is taken out and put in, or refused with names."""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic.core.data_order import DataPosition
from elastic.core.learning_rate import Ramp
from elastic.core.worker.participation import Progress
from elastic.errors import CheckpointDamaged, CheckpointMismatch, ConfigurationError
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.membership import differences
from elastic.worker.group.process_group import Group
from elastic.worker.state.backlog import LedgerRecord
from elastic.worker.state.cells import TorchGenerator
from elastic.worker.state.checkpointing import plan_shards
from elastic.worker.state.job_state import JobState, progress_of
from elastic.worker.state.tensor_specs import describe
from tests.unit.worker.around_optimizer import Lookahead
from tests.unit.worker.trees import same

RECORD = LedgerRecord(step=4, epoch=1, generation=2, world_size=3, start=0, stop=12)


def tracking(objects: dict[str, Any]) -> JobState:
    state = JobState()
    state.track(objects)
    return state


def make(seed: int, *, width: int = 3, steps: int = 1) -> JobState:
    """A model, its optimizer and its scheduler, after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    state = tracking({"model": model, "optimizer": optimizer})
    state.track({"scheduler": scheduler})
    return state


PROGRESS = Progress(
    committed=5,
    committed_in=2,
    loop=1,
    positions=(DataPosition(epoch=2, cursor=0), DataPosition(epoch=1, cursor=12)),
    ramps={"0": Ramp(start_factor=1.0, end_factor=3.0, start_step=2, steps=9)},
)


def advanced(state: JobState) -> JobState:
    state.progress = PROGRESS
    state.ledger.append(RECORD)
    return state


def restore(target: JobState, source: JobState) -> None:
    """Give the state to the target as over a wire."""
    flat = source.capture()
    tensors = {name: t.clone() for name, t in flat.tensors.items()}
    extra = json.loads(json.dumps(source.extra()))
    target.restore(json.loads(json.dumps(flat.skeleton)), tensors, extra)
    target.progress = progress_of(extra)


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_all_of_it_is_replaced(steps: int) -> None:
    source, target = advanced(make(1)), make(2, steps=steps)
    restore(target, source)
    for name, tracked in source.tracked.items():
        assert same(target.tracked[name].state_dict(), tracked.state_dict()), name
    assert target.progress == PROGRESS
    assert target.committed == 5
    assert target.ledger.since(0) == [RECORD]


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


def test_an_optimizers_state_keeps_its_types_whatever_it_is_made_of() -> None:
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
    right.step()  # its dictionaries count on


def test_the_live_objects_are_filled_not_replaced() -> None:
    target = make(2)
    weight = target.modules()["model"].get_parameter("0.weight")
    restore(target, make(1))
    assert target.modules()["model"].get_parameter("0.weight") is weight


def test_another_model_is_named_tensor_by_tensor() -> None:
    target = make(2, width=4)
    before = target.capture().tensors["model.0.weight"].clone()
    with pytest.raises(
        CheckpointMismatch, match=r"model\.0\.weight is float32\[4, 2\] here and float32\[3, 2\]"
    ):
        restore(target, advanced(make(1)))
    assert torch.equal(target.capture().tensors["model.0.weight"], before)
    assert target.committed == 0


def test_other_names_are_named() -> None:
    target = make(2)
    target.track({"average": nn.Linear(1, 1)})
    with pytest.raises(CheckpointMismatch, match=r"tracks \['average'"):
        restore(target, make(1))


@pytest.mark.parametrize(
    "broken",
    [
        {"committed": "many"},
        {"committed_in": None},
        {"positions": [[-1, 0]]},
        {"positions": [[0]]},
        {"positions": 3},
        {"ramps": {"0": {}}},
        {"ramps": []},
    ],
)
def test_counters_that_cannot_be_read(broken: dict[str, Any]) -> None:
    with pytest.raises(CheckpointDamaged, match="counters"):
        progress_of({**advanced(make(1)).extra(), **broken})


@pytest.mark.parametrize("missing", ["committed", "committed_in", "ramps"])
def test_counters_that_are_missing(missing: str) -> None:
    extra = advanced(make(1)).extra()
    del extra[missing]
    with pytest.raises(CheckpointDamaged, match=missing):
        progress_of(extra)


def test_counters_of_a_checkpoint_from_before_scripts_had_several_loops() -> None:
    extra: dict[str, Any] = {"epoch": 3, "cursor": 8, "committed": 5, "committed_in": 2}
    found = progress_of({**extra, "ramps": {}})
    assert found == Progress(
        committed=5, committed_in=2, positions=(DataPosition(epoch=3, cursor=8),)
    )


UNREADABLE: dict[str, tuple[str, list[Any]]] = {
    "ledger": ("the job's ledger", [None, 5, [{"step": 1}], [3]]),
    "parameter_groups": (
        "the parameter groups of ",
        [None, [3], {"optimizer": 3}, {"optimizer": [3]}, {"optimizer": [[["a"]]]}],
    ),
    "reshaped_buffers": (
        "the shapes of buffers",
        [[3], {"model.least": 3}, {"model.least": [["a"]]}, 7],
    ),
    "caches": ("the names of caches", [[3], {"model.cos": 3}, 7, "model.cos", None]),
    "shared_values": (
        "what values share",
        [[3], {"session.state.x": "model.0.weight"}, {"a": [1]}, 7],
    ),
}


@pytest.mark.parametrize(
    ("part", "damaged"), [(part, each) for part in UNREADABLE for each in UNREADABLE[part][1]]
)
def test_a_part_of_the_extra_state_that_cannot_be_read_is_damage(part: str, damaged: Any) -> None:
    source, target = make(1), make(2)
    flat, extra = source.capture(), {**source.extra(), part: damaged}
    with pytest.raises(CheckpointDamaged, match=f"{UNREADABLE[part][0]}.* cannot be read"):
        target.restore(flat.skeleton, flat.tensors, extra)


def test_what_cannot_be_tracked_is_named() -> None:
    state = make(1)
    with pytest.raises(ConfigurationError, match=r"numbers=.*list.*state_dict"):
        state.track({"numbers": [1]})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"model=.*another object"):
        state.track({"model": nn.Linear(1, 1)})
    state.track({"model": state.modules()["model"]})  # the same again


def test_the_names_of_buffers_are_local(alone: Group) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            self.register_buffer("queue", torch.zeros(4))
            self.register_buffer("scratch", torch.zeros(4), persistent=False)
            self.register_buffer("nothing", torch.zeros(0))

    net, tied = Net(), Net()
    tied.register_buffer("queue", net.get_buffer("queue"))
    distributed = DistributedModel(net, {})
    distributed.wrap(alone.backend)
    averaged = AveragedModel(nn.Linear(2, 3))
    state = tracking({"model": distributed, "tied": tied, "ema": averaged})
    state.track({"sgd": torch.optim.SGD(net.parameters(), momentum=0.9)})
    running = ("inner.1.running_mean", "inner.1.running_var", "inner.1.num_batches_tracked")
    assert state.local_names(state.capture()) == {
        "model.queue",
        *(f"model.{name}" for name in running),
        *(f"tied.{name}" for name in running),
        "ema.n_averaged",
    }


def test_optimizers_and_modules_are_told_apart() -> None:
    state = make(1)
    assert [type(o).__name__ for o in state.optimizers()] == ["AdamW"]
    assert list(state.modules()) == ["model"]


def test_signatures_are_equal_for_alike_objects_only() -> None:
    """Whether the optimizer has made its state yet does not matter."""
    signature = make(1, steps=0).signature()
    assert signature == make(2, steps=2).signature()
    assert 0 <= signature < 2**63
    assert signature != make(1, width=4).signature()
    renamed = make(1)
    renamed.track({"average": renamed.optimizers()[0]})
    assert signature != renamed.signature()


# ---- what a script holds on to


def test_groups_and_state_of_an_optimizer_are_the_ones_that_a_script_refers_to() -> None:
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
    """Shares the groups of the optimizer inside of it, as SAM does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {"rho": 0.05})
        self.inner = inner
        inner.param_groups = self.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


@pytest.mark.parametrize("names", [("around", "inner"), ("inner", "around")])
def test_an_optimizer_and_the_one_around_it_share_their_groups_as_before(
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


def test_an_optimizer_whose_class_has_a_state_dict_of_its_own_is_given_to_others() -> None:
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
    """Keeps momentum in float32 whatever the parameters are in, and notes beside it."""

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
def test_what_an_own_state_dict_keeps_in_another_type_than_its_parameters_stays_in_it(
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


def test_lists_in_the_sessions_state_are_the_ones_that_a_script_refers_to() -> None:
    source, target = make(1), make(2)
    source.values.update(losses=[0.5, {"at": [1, 2]}], seen={3}, best=0.5)
    target.values.update(losses=[7.0, {"at": [1], "more": 0}, 9], seen={1, 2}, best=[])
    losses, seen = target.values["losses"], target.values["seen"]
    deep = losses[1]["at"]
    restore(target, source)
    assert target.values == source.values
    assert losses == [0.5, {"at": [1, 2]}]
    assert seen == {3}
    deep.append(3)
    assert target.values["losses"][1]["at"] == [1, 2, 3]


# ---- which parameters are trained


def grown(*, groups: int, named: bool = False) -> tuple[JobState, torch.optim.Optimizer]:
    """Two layers, of which an optimizer trains the first, and later the second."""
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
def test_parameter_groups_that_a_script_forms_anew_are_formed_in_a_newcomers_optimizer(
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


def test_a_parameter_group_of_what_is_not_tracked_by_name_is_refused() -> None:
    sender, optimizer = grown(groups=1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    receiver, _ = grown(groups=1)
    with pytest.raises(CheckpointMismatch, match="2 parameter groups in the saved state and 1"):
        restore(receiver, sender)


def test_a_group_can_be_added_to_one_of_what_no_module_has() -> None:
    """A temperature, say, that stays in its group."""

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


def test_groups_are_formed_in_an_optimizer_that_has_none_yet() -> None:
    (sender, theirs), (receiver, mine) = grown(groups=2), grown(groups=1)
    mine.param_groups.clear()
    restore(receiver, sender)
    assert same(mine.state_dict(), theirs.state_dict())


class Observed(nn.Module):
    """Keeps the least value that each channel has had, as a quantizer does, and their mean."""

    least: torch.Tensor
    mean: torch.Tensor | None

    def __init__(self, *, channels: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(2, channels)
        self.register_buffer("least", torch.zeros(0))
        self.register_buffer("mean", None)
        self.register_buffer("mask", torch.ones(channels))

    def observe(self) -> None:
        with torch.no_grad():
            outputs = self.layer(torch.ones(4, 2))
        self.least = outputs.amin(dim=0)
        self.mean = outputs.mean(dim=0)


def observed(*, seen: bool, mask: int = 3) -> JobState:
    model = Observed()
    model.register_buffer("mask", torch.ones(mask))
    state = tracking({"model": model})
    if seen:
        model.observe()
    return state


@pytest.mark.parametrize(("there", "here"), [(True, False), (False, True), (True, True)])
def test_buffers_that_have_changed_in_shape_are_given_to_others(there: bool, here: bool) -> None:
    sender, receiver = observed(seen=there), observed(seen=here)
    assert sender.signature() == receiver.signature()
    restore(receiver, sender)
    assert receiver.digest() == sender.digest()
    assert receiver.saved_shapes() == sender.saved_shapes()
    assert same(receiver.tracked["model"].state_dict(), sender.tracked["model"].state_dict())
    assert receiver.signature() == observed(seen=False).signature()


def test_a_module_that_is_tracked_again_has_been_built_as_it_was_at_first() -> None:
    sender, receiver = observed(seen=True), observed(seen=False)
    sender.track(dict(sender.modules()))
    assert sender.signature() == receiver.signature()
    restore(receiver, sender)
    assert receiver.digest() == sender.digest()


class Brief(Observed):
    """Does not save what it has observed."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        found = super().state_dict(*args, **named)
        return {name: tensor for name, tensor in found.items() if "seen" not in name}

    def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        return super().load_state_dict(state_dict, *args, **{**named, "strict": False})


def test_a_buffer_that_a_class_leaves_out_of_its_state_stays() -> None:
    states = []
    for value in (1.0, 2.0):
        model, state = Brief(), JobState()
        state.track({"model": model})
        model.register_buffer("seen", torch.full((3,), value))
        states.append(state)
    sender, receiver = states
    restore(receiver, sender)
    assert receiver.modules()["model"].get_buffer("seen").tolist() == [2.0] * 3


@pytest.mark.parametrize("seen", [False, True])
def test_buffers_that_were_built_otherwise_are_those_of_another_model(seen: bool) -> None:
    sender, receiver = observed(seen=seen, mask=4), observed(seen=False)
    assert sender.signature() != receiver.signature()
    with pytest.raises(
        CheckpointMismatch, match=r"model.mask is float32\[3\] here and .*\[4\] there"
    ):
        restore(receiver, sender)


def test_flags_of_parameters_are_part_of_the_state() -> None:
    """Gradual unfreezing: members that wrap other parameters would reduce other buckets."""
    source, target = make(1), make(1)
    weight = source.modules()["model"].get_parameter("0.weight")
    before = source.digest()
    weight.requires_grad_(False)
    assert source.digest() != before
    restore(target, source)
    assert not target.modules()["model"].get_parameter("0.weight").requires_grad
    assert target.modules()["model"].get_parameter("0.bias").requires_grad
    weight.requires_grad_(True)
    restore(target, source)
    assert target.modules()["model"].get_parameter("0.weight").requires_grad


def modes(state: JobState) -> list[bool]:
    return [module.training for module in state.modules()["model"].modules()]


def test_modes_of_modules_come_with_the_state() -> None:
    """Statistics that are frozen by eval() once, at a step that a newcomer has not been through."""
    source, target = make(1), make(1)
    before = source.digest()
    source.modules()["model"].get_submodule("1").eval()
    assert source.digest() == before  # rank 0 alone may evaluate
    restore(target, source)
    assert modes(target) == [True, True, False]
    source.modules()["model"].train()
    restore(target, source)
    assert modes(target) == [True, True, True]


def test_modes_of_an_evaluation_below_the_loop_do_not_come_with_the_state() -> None:
    """A job that goes on from the checkpoint at its end would train on in eval()."""
    source, target = make(1), make(1)
    source.modules()["model"].get_submodule("1").eval()
    source.loop_ended()
    source.modules()["model"].eval()
    restore(target, source)
    assert modes(target) == [True, True, False]
    source.loop_begins()
    restore(target, source)
    assert modes(target) == [False, False, False]


def test_modes_of_another_number_of_modules_are_left_alone() -> None:
    source, target = make(1), make(1)
    source.modules()["model"].eval()
    flat, extra = source.capture(), {**source.extra(), "modes": {"model": "00"}}
    target.restore(flat.skeleton, flat.tensors, extra)
    assert modes(target) == [True, True, True]


# ---- digests: what is compared between members


def change_weight(state: JobState) -> None:
    with torch.no_grad():
        state.modules()["model"].get_parameter("0.weight")[1, 1] += 1e-6


def change_moment(state: JobState) -> None:
    next(iter(state.optimizers()[0].state.values()))["exp_avg"][0, 0] += 1e-6


def change_rate(state: JobState) -> None:
    state.optimizers()[0].param_groups[0]["lr"] *= 1.5


def change_schedule(state: JobState) -> None:
    state.tracked["scheduler"].last_epoch += 1  # type: ignore[attr-defined]


def change_values(state: JobState) -> None:
    state.values["best"] = 2.0


def change_ramp(state: JobState) -> None:
    ramp = Ramp(start_factor=1.0, end_factor=2.0, start_step=0, steps=9)
    state.progress = replace(state.progress, ramps={"0": ramp})


def change_position(state: JobState) -> None:
    state.progress = replace(state.progress, positions=(DataPosition(epoch=0, cursor=4),))


CHANGES = {
    change_weight: ["model.0.weight"],
    change_moment: ["optimizer.state.0.exp_avg"],
    change_rate: ["optimizer (numbers)"],
    change_schedule: ["scheduler (numbers)"],
    change_values: ["session.state (numbers)"],
    change_ramp: ["the job's counters"],
    change_position: ["the job's counters"],
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_difference_of_replicated_state_shows_and_is_named(
    change: Callable[[JobState], None],
) -> None:
    left, right = make(1), make(1)
    assert left.digest() == right.digest()
    assert differences(left.digests(), right.digests()) == []
    change(right)
    assert left.digest() != right.digest()
    assert differences(left.digests(), right.digests()) == CHANGES[change]


def test_rank_local_state_is_not_compared() -> None:
    left, right = make(1), make(1)
    for state, mean in ((left, 1.0), (right, 2.0)):
        state.track({"statistics": nn.Linear(1, 1).requires_grad_(False)}, rank_local=True)
        state.modules()["statistics"].get_parameter("weight").fill_(mean)
        state.modules()["model"].get_buffer("1.running_mean").fill_(mean)
    assert left.digest() == right.digest()
    assert differences(left.digests(), right.digests()) == []


class Meter:
    """Is set back before it takes a state over."""

    def __init__(self, total: float) -> None:
        self.total = torch.full((3,), total)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.total.zero_()
        self.total += state_dict["total"]


def test_a_state_received_in_place_is_taken_over_by_objects_of_any_kind() -> None:
    source, target = make(1), make(2)
    for state, total in ((source, 5.0), (target, 1.0)):
        state.track({"meter": Meter(total)})
    sent, into = source.capture(), target.receivable()
    assert {"model.0.weight", "model.0.bias"} <= into.keys()
    received = {name: into.get(name, tensor.clone()) for name, tensor in sent.tensors.items()}
    for name, tensor in received.items():
        tensor.copy_(sent.tensors[name])
    target.restore(sent.skeleton, received, source.extra())
    assert same(target.capture().tensors, sent.tensors)


def test_rank_local_parameters_are_not_compared_either() -> None:
    states = [JobState(), JobState()]
    for seed, state in enumerate(states):
        torch.manual_seed(seed)
        head = nn.Linear(2, 2).requires_grad_(bool(seed))
        state.track({"model": nn.Linear(1, 1).requires_grad_(True)})
        nn.init.ones_(state.modules()["model"].weight)
        nn.init.ones_(state.modules()["model"].bias)
        state.track({"head": head}, rank_local=True)
    left, right = states
    assert left.parameters_digest() == right.parameters_digest()
    assert left.parameter_digests() == right.parameter_digests()
    assert left.digest() == right.digest()
    assert left.digests() == right.digests()
    nn.init.zeros_(left.modules()["model"].weight)
    assert left.parameters_digest() != right.parameters_digest()


def test_rank_local_state_is_given_to_others_like_the_rest() -> None:
    source, target = make(1), make(2)
    for state in (source, target):
        state.track({"own": nn.Linear(1, 1)}, rank_local=True)
    restore(target, source)
    assert same(
        target.tracked["own"].state_dict(),
        source.tracked["own"].state_dict(),
    )
    mean = "1.running_mean"
    assert torch.equal(
        target.modules()["model"].get_buffer(mean), source.modules()["model"].get_buffer(mean)
    )


def test_results_of_calls_may_differ_between_the_members_that_save() -> None:
    """Such as each rank's predictions: where the others' shares of a checkpoint begin and end must
    not follow from them."""
    shares = []
    for rank, count in enumerate((3, 2)):
        state = make(1)
        state.results["0/0"] = {"predictions": torch.full((count, 7), float(rank))}
        flat = state.capture()
        shards = plan_shards(
            describe(flat.tensors), 2, state.local_names(flat), state.declared_local(flat)
        )
        shares.append(shards[rank])
    names = [{piece.name for piece in share} for share in shares]
    assert "session.results.0/0.predictions" in names[0] - names[1]
    elements = Counter[str]()
    for share in shares:
        for piece in share:
            elements[piece.name] += piece.stop - piece.start
    tensors = make(1).capture().tensors
    assert {n: elements[n] for n in tensors} == {n: t.numel() for n, t in tensors.items()}


def test_gradients_of_what_is_rank_local_may_be_there_on_one_member_alone() -> None:
    states = []
    for has_gradient in (True, False):
        own = nn.Linear(1, 1)
        if has_gradient:
            own.weight.grad = torch.ones(1, 1)
        state = make(1)
        state.track({"own": own}, rank_local=True)
        states.append(state)
    left, right = (state.saved_shapes() for state in states)
    assert left == right
    assert "session.gradients.gradients.model.0.weight" in left
    assert not any("own" in name for name in left)


class Tied(nn.Module):
    """Reads and writes with the same weights, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(5, 3)
        self.write = nn.Linear(3, 5, bias=False)
        self.write.weight = self.read.weight


class Shadow:
    """Keeps tensors by name: what it is given, or copies of it."""

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies
        self.tensors: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tensors = state_dict["tensors"]
        self.tensors = {n: t.clone() for n, t in tensors.items()} if self.copies else tensors


def sharing(seed: int) -> JobState:
    """One whose tensors share memory in many ways, if it is the one of seed 1."""
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
def test_the_shares_of_members_fit_whatever_shares_memory_in_one_of_them(
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
def test_values_that_follow_a_model_and_an_optimizer_do_so_in_a_newcomer(best_there: bool) -> None:
    """A state_dict() kept without a copy, and one that an optimizer has loaded."""
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


def test_values_in_tuples_follow_a_model_in_a_newcomer() -> None:
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
def test_values_that_follow_a_model_in_a_newcomer_only_come_to_be_its_own(inside: Any) -> None:
    """As of a script that begins with the model's state_dict(), and replaces it by a copy once
    there is a better one."""
    source, target = make(1), make(2)
    source.values["best"] = inside(copy.deepcopy(source.modules()["model"].state_dict()))
    add_to(source.modules()["model"])
    target.values["best"] = inside(target.modules()["model"].state_dict())
    restore(target, source)
    for state in (source, target):
        add_to(state.modules()["model"])
    assert same(target.values.state_dict(), source.values.state_dict())
    assert target.digest() == source.digest()


def test_what_shares_memory_with_a_model_that_is_tracked_later_takes_no_name_of_it() -> None:
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


def test_parameters_are_compared_by_name_without_optimizers_and_buffers() -> None:
    left, right = make(1), make(1)
    change_moment(right)
    right.modules()["model"].get_buffer("1.running_mean").fill_(9.0)
    assert left.parameters_digest() == right.parameters_digest()
    change_weight(right)
    assert left.parameters_digest() != right.parameters_digest()
    assert differences(left.parameter_digests(), right.parameter_digests()) == ["model.0.weight"]


# ---- the session's own objects


def test_a_state_from_before_an_object_of_the_sessions_own_existed_is_taken() -> None:
    """Such as a checkpoint of an older version, or of a script without this generator."""
    source, target = make(1), make(2)
    target.track_own("session.generator.noise", nn.Linear(1, 1))
    target.values["phase"] = 3
    restore(target, source)
    assert target.values == {}
    assert same(target.tracked["model"].state_dict(), source.tracked["model"].state_dict())


def test_a_name_with_a_dot_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'encoder\.first' has a dot"):
        JobState().track({"encoder.first": nn.Linear(2, 2)})


def test_what_is_tracked_can_have_no_name_of_the_sessions_own() -> None:
    state = make(1)
    state.values["best"] = 0.5
    assert set(state.tracked) == {"model", "optimizer", "scheduler"}
    assert {"session.state", "session.means", "session.results"} <= set(state.everything)


def generator(seed: int) -> TorchGenerator:
    return TorchGenerator(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("made", [(), ("b",), ("b", "a")], ids=["none", "one", "both"])
def test_a_generator_that_the_script_makes_later_has_the_state_that_was_received(
    made: tuple[str, ...],
) -> None:
    """Until then it is compared, given to others and saved as if it were there."""
    source, target = make(1), make(2)
    for seed, name in enumerate("ab"):
        source.track_own(f"session.generator.{name}", generator(seed))
    for name in made:
        target.track_own(f"session.generator.{name}", generator(9))
    restore(target, source)
    assert target.digest() == source.digest()
    assert describe(target.capture().tensors) == describe(source.capture().tensors)
    for name in {"a", "b"} - set(made):
        target.track_own(f"session.generator.{name}", generator(9))
    assert target.digest() == source.digest()
    for name in "ab":
        pair = [s.everything[f"session.generator.{name}"].generator for s in (source, target)]
        assert torch.rand(1, generator=pair[0]) == torch.rand(1, generator=pair[1])
