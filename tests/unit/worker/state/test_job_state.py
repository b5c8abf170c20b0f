"""Everything that a joining worker needs is taken out and put in, or refused with names."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic.core.data_order import DataPosition
from elastic.core.learning_rate import Ramp
from elastic.errors import CheckpointDamaged, CheckpointMismatch, ConfigurationError
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group
from elastic.worker.state.job_state import JobState
from elastic.worker.state.ledger import LedgerRecord
from tests.unit.worker.trees import same

RECORD = LedgerRecord(step=4, epoch=1, generation=2, world_size=3, start=0, stop=12)


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
    state = JobState()
    state.track({"model": model, "optimizer": optimizer})
    state.track({"scheduler": scheduler})
    return state


def advanced(state: JobState) -> JobState:
    state.committed = 5
    state.committed_in = 2
    state.position = DataPosition(epoch=1, cursor=12)
    state.ramps = {"0": Ramp(start_factor=1.0, end_factor=3.0, start_step=2, steps=9)}
    state.ledger.append(RECORD)
    return state


def restore(target: JobState, source: JobState) -> None:
    """As over a wire."""
    flat = source.capture()
    tensors = {name: t.clone() for name, t in flat.tensors.items()}
    extra = json.loads(json.dumps(source.extra()))
    target.restore(json.loads(json.dumps(flat.skeleton)), tensors, extra)


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
def test_all_of_it_is_replaced(steps: int) -> None:
    source, target = advanced(make(1)), make(2, steps=steps)
    restore(target, source)
    for name, tracked in source.tracked.items():
        assert same(target.tracked[name].state_dict(), tracked.state_dict()), name
    assert (target.committed, target.committed_in) == (5, 2)
    assert target.position == source.position
    assert target.ramps == source.ramps
    assert target.ledger.since(0) == [RECORD]


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


@pytest.mark.parametrize("broken", [{}, {"committed": "many"}, {"epoch": -1}, {"ramps": {"0": {}}}])
def test_counters_that_can_not_be_read(broken: dict[str, object]) -> None:
    source = advanced(make(1))
    flat = source.capture()
    extra = {**source.extra(), **broken} if broken else {}
    with pytest.raises(CheckpointDamaged):
        make(2).restore(flat.skeleton, flat.tensors, extra)


def test_what_can_not_be_tracked_is_named() -> None:
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
    state = JobState()
    state.track({"model": distributed, "tied": tied, "ema": averaged})
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
