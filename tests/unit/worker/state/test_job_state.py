"""All state that a joining worker needs is captured and restored, or refused with names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic.core.data_order import DataPosition
from elastic.core.worker.participation import Progress
from elastic.errors import CheckpointDamaged, CheckpointMismatch, ConfigurationError
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group
from elastic.worker.state.cells import TorchGenerator
from elastic.worker.state.job_state import JobState, progress_of
from elastic.worker.state.tensor_specs import describe
from tests.unit.worker.state.collecting import Collecting
from tests.unit.worker.state.job_states import PROGRESS, RECORD, advanced, make, restore, tracking
from tests.unit.worker.state.late_buffers import LATE, InPlaceOfAnother, Late, WithNumber
from tests.unit.worker.trees import same


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_a_restore_replaces_the_whole_state(steps: int) -> None:
    source, target = advanced(make(1)), make(2, steps=steps)
    restore(target, source)
    for name, tracked in source.tracked.items():
        assert same(target.tracked[name].state_dict(), tracked.state_dict()), name
    assert target.progress == PROGRESS
    assert target.committed == 5
    assert target.ledger.since(0) == [RECORD]


def test_the_live_objects_are_filled_not_replaced() -> None:
    target = make(2)
    weight = target.modules()["model"].get_parameter("0.weight")
    restore(target, make(1))
    assert target.modules()["model"].get_parameter("0.weight") is weight


def test_an_object_that_replaces_another_has_its_place_in_the_state() -> None:
    """A second phase has an optimizer of its own, by the name of the first one's."""
    source, target = make(1), make(2)
    before = target.version
    for state in (source, target):
        parameters = state.modules()["model"].parameters()
        state.replace("optimizer", torch.optim.SGD(parameters, lr=0.25 if state is source else 0.5))
    assert target.version > before
    assert target.signature() == source.signature()
    restore(target, source)
    (optimizer,) = target.optimizers()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_state_of_another_model_is_refused_with_the_names_of_tensors() -> None:
    target = make(2, width=4)
    before = target.capture().tensors["model.0.weight"].clone()
    with pytest.raises(
        CheckpointMismatch, match=r"model\.0\.weight is float32\[4, 2\] here and float32\[3, 2\]"
    ):
        restore(target, advanced(make(1)))
    assert torch.equal(target.capture().tensors["model.0.weight"], before)
    assert target.committed == 0


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("lengths", [(3, 0), (0, 2), (2, 3)])
def test_a_metric_that_collects_tensors_is_restored_with_another_number_of_them(
    lengths: tuple[int, int], local: bool
) -> None:
    sides = []
    for length in lengths:
        metric = Collecting()
        metric.collected = [torch.full((2,), float(i)) for i in range(length)]
        state = JobState()
        state.track({"metric": metric}, rank_local=local)
        sides.append((metric, state))
    (source, from_), (target, to) = sides
    assert from_.signature() == to.signature()
    restore(to, from_)
    assert same(target.collected, source.collected)


def test_a_metric_of_another_width_is_refused_whatever_it_has_collected() -> None:
    narrow, wide = Collecting(2), Collecting(3)
    narrow.collected = [torch.zeros(1)]
    assert tracking({"metric": narrow}).signature() != tracking({"metric": wide}).signature()
    with pytest.raises(CheckpointMismatch, match=r"metric\.threshold is float32\[3\] here"):
        restore(tracking({"metric": wide}), tracking({"metric": narrow}))


def test_a_state_with_other_tracked_names_is_refused_with_these_names() -> None:
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
def test_counters_that_cannot_be_read_are_damage(broken: dict[str, Any]) -> None:
    with pytest.raises(CheckpointDamaged, match="counters"):
        progress_of({**advanced(make(1)).extra(), **broken})


@pytest.mark.parametrize("missing", ["committed", "committed_in", "ramps"])
def test_a_missing_counter_is_named_as_damage(missing: str) -> None:
    extra = advanced(make(1)).extra()
    del extra[missing]
    with pytest.raises(CheckpointDamaged, match=missing):
        progress_of(extra)


def test_counters_of_a_checkpoint_from_before_there_were_several_loops_are_read() -> None:
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
    "removed_buffers": ("the names of buffers", [[3], {"model.cos": 3}, 7, "model.cos", None]),
    "beyond_modules": ("the names of tensors", [[3], {"model.seen": 3}, 7, "model.seen", None]),
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


def test_tracking_an_unsuitable_object_or_under_a_taken_name_is_refused() -> None:
    state = make(1)
    with pytest.raises(ConfigurationError, match=r"numbers=.*list.*state_dict"):
        state.track({"numbers": [1]})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"model=.*another object"):
        state.track({"model": nn.Linear(1, 1)})
    state.track({"model": state.modules()["model"]})  # the same object may be tracked again


def test_saved_buffers_are_listed_as_local(alone: Group) -> None:
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


def test_signatures_are_equal_only_for_objects_of_equal_structure() -> None:
    """Whether the optimizer has made its state yet does not matter."""
    signature = make(1, steps=0).signature()
    assert signature == make(2, steps=2).signature()
    assert 0 <= signature < 2**63
    assert signature != make(1, width=4).signature()
    renamed = make(1)
    renamed.track({"average": renamed.optimizers()[0]})
    assert signature != renamed.signature()


def test_containers_in_session_state_keep_their_identity_when_restored() -> None:
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


# ---- buffers, flags and modes


class Observed(nn.Module):
    """Keeps the least value and the mean of each channel, as a quantizer does."""

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
def test_buffers_that_changed_shape_are_restored_on_another_member(there: bool, here: bool) -> None:
    sender, receiver = observed(seen=there), observed(seen=here)
    assert sender.signature() == receiver.signature()
    restore(receiver, sender)
    assert receiver.digest() == sender.digest()
    assert receiver.saved_shapes() == sender.saved_shapes()
    assert same(receiver.tracked["model"].state_dict(), sender.tracked["model"].state_dict())
    assert receiver.signature() == observed(seen=False).signature()


@pytest.mark.parametrize(("there", "here"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", [kind for kind in LATE if kind is not WithNumber])
def test_buffers_registered_in_a_forward_pass_are_restored_on_another_member(
    kind: type[Late], there: bool, here: bool
) -> None:
    models, states = [], []
    for seen in (there, here):
        models.append(nn.Sequential(nn.Linear(2, 2), kind()))
        states.append(tracking({"model": models[-1]}))
        if seen:
            models[-1][1]()
    sender, receiver = states
    if kind is not InPlaceOfAnother:
        assert sender.signature() == receiver.signature()
    restore(receiver, sender)
    if there:
        assert receiver.digest() == sender.digest()
        assert same(models[1].state_dict(), models[0].state_dict())
    for model in models:
        model[1]()
    if there:
        assert [model[1].seen.tolist() for model in models] == [[2.0] * 3] * 2


def test_a_late_buffer_that_two_modules_share_is_shared_by_another_member() -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()) for _ in range(2)]
    states = [tracking({"model": model}) for model in models]
    shared = torch.ones(3)
    models[0][1].register_buffer("scale", shared)
    models[0][2].register_buffer("scale", shared)
    restore(states[1], states[0])
    assert models[1][1].scale is models[1][2].scale


def test_tracking_a_module_again_does_not_change_its_signature() -> None:
    sender, receiver = observed(seen=True), observed(seen=False)
    sender.track(dict(sender.modules()))
    assert sender.signature() == receiver.signature()
    restore(receiver, sender)
    assert receiver.digest() == sender.digest()


class Brief(Observed):
    """Leaves its buffer `seen` out of its state."""

    def state_dict(self, *args: Any, **named: Any) -> Any:
        found = super().state_dict(*args, **named)
        return {name: tensor for name, tensor in found.items() if "seen" not in name}

    def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        return super().load_state_dict(state_dict, *args, **{**named, "strict": False})


def test_a_buffer_that_a_class_leaves_out_of_its_state_is_not_overwritten() -> None:
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
def test_buffers_built_with_another_shape_are_refused(seen: bool) -> None:
    sender, receiver = observed(seen=seen, mask=4), observed(seen=False)
    assert sender.signature() != receiver.signature()
    with pytest.raises(
        CheckpointMismatch, match=r"model.mask is float32\[3\] here and .*\[4\] there"
    ):
        restore(receiver, sender)


def test_requires_grad_flags_are_part_of_the_state() -> None:
    """With gradual unfreezing, members whose flags differ would reduce different buckets."""
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


def test_train_and_eval_modes_of_modules_come_with_the_state() -> None:
    """A script may freeze statistics by eval() once, at a step that a newcomer has not run."""
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
    """Otherwise a job that goes on from its last checkpoint would train in eval()."""
    source, target = make(1), make(1)
    source.modules()["model"].get_submodule("1").eval()
    source.loop_ended()
    source.modules()["model"].eval()
    restore(target, source)
    assert modes(target) == [True, True, False]
    source.loop_begins()
    restore(target, source)
    assert modes(target) == [False, False, False]


def test_modes_for_another_number_of_modules_are_ignored() -> None:
    source, target = make(1), make(1)
    source.modules()["model"].eval()
    flat, extra = source.capture(), {**source.extra(), "modes": {"model": "00"}}
    target.restore(flat.skeleton, flat.tensors, extra)
    assert modes(target) == [True, True, True]


class Meter:
    """Resets itself before it loads a state."""

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


# ---- the session's own objects


def test_a_state_that_lacks_an_object_of_the_session_is_accepted() -> None:
    """Such a state comes from an older version, or from a script without this generator."""
    source, target = make(1), make(2)
    target.track_own("session.generator.noise", nn.Linear(1, 1))
    target.values["phase"] = 3
    restore(target, source)
    assert target.values == {}
    assert same(target.tracked["model"].state_dict(), source.tracked["model"].state_dict())


def test_a_name_with_a_dot_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'encoder\.first' has a dot"):
        JobState().track({"encoder.first": nn.Linear(2, 2)})


def test_the_sessions_own_objects_are_not_among_the_tracked_ones() -> None:
    state = make(1)
    state.values["best"] = 0.5
    assert set(state.tracked) == {"model", "optimizer", "scheduler"}
    assert {"session.state", "session.means", "session.results"} <= set(state.everything)


def generator(seed: int) -> TorchGenerator:
    return TorchGenerator(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("made", [(), ("b",), ("b", "a")], ids=["none", "one", "both"])
def test_a_generator_made_after_a_restore_takes_over_the_received_state(
    made: tuple[str, ...],
) -> None:
    """Until then that state is compared, sent and saved as if the generator existed."""
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
