"""A checkpoint is read straight into the tensors of the state, as far as these fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import path_in_step, shard_name
from elastic.errors import CheckpointDamaged
from elastic.worker.state.checkpointing import Structure, load, load_latest
from elastic.worker.state.job_state import JobState
from elastic.worker.state.tree import flatten, unflatten
from tests.unit.worker.saving import GROUP, make_state, save
from tests.unit.worker.state.job_states import tracking
from tests.unit.worker.trees import same, same_tensor

NAME = "model.weight"


def into(**live: torch.Tensor) -> Callable[[Structure], Mapping[str, torch.Tensor]]:
    return lambda _: {name.replace("__", "."): tensor for name, tensor in live.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_tensors_of_every_type_are_read_in_place(tmp_path: Path, count: int) -> None:
    directory, state = open_directory(str(tmp_path)), make_state(1)
    save(directory, 1, state, count)
    live = {n: t.clone().contiguous() for n, t in flatten(make_state(2)).tensors.items()}
    loaded = load(directory, 1, lambda _: live)
    assert same(unflatten(loaded.structure.skeleton, loaded.tensors), state)
    for name, tensor in loaded.tensors.items():
        assert tensor.data_ptr() == live[name].data_ptr(), name
        assert same_tensor(tensor, live[name]), name


def _expanded() -> torch.Tensor:
    return torch.full((5,), 7.0).expand(3, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.full((3, 5), 7.0, dtype=torch.float64),
        lambda: torch.full((5, 3), 7.0),
        lambda: torch.full((15,), 7.0),
        lambda: torch.full((5, 3), 7.0).t(),
        _expanded,
        lambda: torch.empty((3, 5), device="meta"),
        lambda: torch.full((3, 5), -7.0j).imag,
        lambda: torch.full((3, 5), 7.0 + 1j).conj().imag,
    ],
    ids=["dtype", "shape", "flat", "transposed", "expanded", "device", "strided", "negative"],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_tensor_that_does_not_fit_stays_as_it_is(
    tmp_path: Path, make: Callable[[], torch.Tensor], count: int
) -> None:
    saved = torch.arange(15.0).view(3, 5)
    directory = open_directory(str(tmp_path))
    save(directory, 1, {"model": {"weight": saved}}, count)
    live = make()
    before = None if live.is_meta else live.clone()
    found = load(directory, 1, into(model__weight=live)).tensors[NAME]
    assert same_tensor(found, saved)
    assert found.is_contiguous()
    assert before is None or torch.equal(live, before)


def test_a_parameter_is_read_into_and_has_no_history(tmp_path: Path) -> None:
    directory, saved = open_directory(str(tmp_path)), torch.arange(6.0)
    save(directory, 1, {"model": {"weight": saved}})
    live = nn.Parameter(torch.zeros(6))
    found = load(directory, 1, into(model__weight=live)).tensors[NAME]
    assert torch.equal(live, saved)
    assert live.requires_grad
    assert not found.requires_grad
    live.untyped_storage().resize_(0)  # as FSDP does


@pytest.mark.parametrize("last", [False, True], ids=["first shard", "last shard"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_what_a_damaged_checkpoint_has_left_is_overwritten_by_the_one_before(
    tmp_path: Path, how: str, last: bool
) -> None:
    directory = open_directory(str(tmp_path))
    older, newer = ({"model": {"weight": torch.full((100,), value)}} for value in (1.0, 2.0))
    save(directory, 1, older)
    save(directory, 2, newer)
    path = tmp_path / path_in_step(2, shard_name(int(last), 2, GROUP))
    content = path.read_bytes()
    if how == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    live = torch.zeros(100)
    damaged: list[int] = []
    loaded = load_latest(directory, lambda step, _: damaged.append(step), into(model__weight=live))
    assert loaded is not None
    assert (loaded.manifest.step, damaged) == (1, [2])
    assert same_tensor(loaded.tensors[NAME], older["model"]["weight"])
    assert loaded.tensors[NAME].data_ptr() == live.data_ptr()


class _CutMeanwhile:
    """A directory whose files end before the length that they seemed to have."""

    def __init__(self, inner: CheckpointDirectory) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def chunks(self, relative: str) -> Iterator[memoryview]:
        for piece in self._inner.chunks(relative):
            yield piece[:-1] if "shard-00000" in relative else piece


def test_a_file_that_is_cut_while_it_is_read_is_damage(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    save(directory, 1, {"model": {"weight": torch.arange(6.0)}})
    cut: Any = _CutMeanwhile(directory)
    with pytest.raises(CheckpointDamaged, match=r"shard-00000.* is damaged: it has .* bytes inst"):
        load(cut, 1)


class _OwnWay(nn.Linear):
    """Loads its state by code of its own, which may look at what it has."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        assert state_dict[f"{prefix}weight"].data_ptr() != self.weight.data_ptr()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _tied(value: float) -> JobState:
    """Read weights are written with, one layer has others' memory, another one loads by itself."""
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 4))
    net[1].weight = net[0].weight
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    own = _OwnWay(4, 4)
    nn.init.constant_(own.weight, value)
    kept = tracking({"net": net, "own": own})
    kept.values["bias"] = net[2].bias.detach()
    return kept


def test_weights_that_share_memory_still_share_it_and_have_the_saved_values(
    tmp_path: Path,
) -> None:
    directory, source, target = open_directory(str(tmp_path)), _tied(2.0), _tied(1.0)
    save(directory, 1, source, 3)
    room = target.comparable()
    assert room.keys() == {"net.2.weight"}
    loaded = load(directory, 1, lambda _: room)
    assert torch.equal(room["net.2.weight"], torch.full((4, 5), 2.0))
    target.restore(loaded.structure.skeleton, loaded.tensors, loaded.structure.extra)
    net: Any = target.tracked["net"]
    assert net[1].weight is net[0].weight
    assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in net.parameters())
    assert target.values["bias"].data_ptr() == net[2].bias.data_ptr()
