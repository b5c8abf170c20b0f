"""A checkpoint is read straight into the tensors of the state, as far as these fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.checkpoint import manifest as manifests
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import path_in_step, shard_name
from elastic.core.worker.participation import Progress
from elastic.errors import CheckpointDamaged
from elastic.worker.state.job_state import JobState
from elastic.worker.state.shards import Structure, load, load_latest
from elastic.worker.state.tree import flatten, unflatten
from tests.unit.worker.saving import GROUP, make_state, save
from tests.unit.worker.state.job_states import At, tracking
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


class _Stages:
    """Sets the net's weight back at the start of each stage, also when it is loaded."""

    def __init__(self, net: nn.Linear) -> None:
        self._net, self.stage = net, 0

    def next(self) -> None:
        self.stage += 1
        nn.init.zeros_(self._net.weight)

    def state_dict(self) -> dict[str, int]:
        return {"stage": self.stage}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        while self.stage < state["stage"]:
            self.next()


class _Staged(nn.Module):
    """Does so in its `set_extra_state`, which torch calls before the layers inside are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1, bias=False)
        self.stages = _Stages(self.head)

    def get_extra_state(self) -> dict[str, int]:
        return self.stages.state_dict()

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        self.stages.load_state_dict(state)


def _apart() -> tuple[dict[str, Any], nn.Linear, _Stages]:
    net = nn.Linear(3, 1, bias=False)
    stages = _Stages(net)
    return {"stages": stages, "model": net}, net, stages


def _inside() -> tuple[dict[str, Any], nn.Linear, _Stages]:
    net = _Staged()
    return {"model": net}, net.head, net.stages


@pytest.mark.parametrize("make", [_apart, _inside], ids=["another object", "extra state"])
def test_weights_are_those_of_the_checkpoint_if_code_that_is_loaded_first_writes_to_them(
    tmp_path: Path, make: Callable[[], tuple[dict[str, Any], nn.Linear, _Stages]]
) -> None:
    def state_of(tracked: dict[str, Any]) -> JobState:
        state = JobState()
        state.track(tracked)
        state.job = At(Progress(committed=1, committed_in=1))
        return state

    directory = open_directory(str(tmp_path))
    tracked, net, stages = make()
    stages.next()
    nn.init.constant_(net.weight, 9.0)
    save(directory, 1, state_of(tracked), 1)
    tracked, net, _ = make()
    state = state_of(tracked)
    loaded = load(directory, 1, lambda _: state.comparable())
    state.restore(loaded.structure.skeleton, loaded.tensors, loaded.structure.extra)
    assert net.weight.tolist() == [[9.0] * 3]


def test_a_shard_that_grows_while_it_is_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_directory(str(tmp_path))
    save(directory, 1, {"model": {"weight": torch.arange(3_000_000.0)}}, 1)
    path = tmp_path / path_in_step(1, shard_name(0, 1, GROUP))
    read = directory.chunks

    def growing(relative: str) -> Iterator[memoryview]:
        for piece in read(relative):
            if relative == path_in_step(1, path.name):
                os.truncate(path, 2**42)  # takes no space
            yield piece

    monkeypatch.setattr(directory, "chunks", growing)
    with pytest.raises(CheckpointDamaged, match=r"it has \d+ bytes instead of 1200\d+"):
        load(directory, 1)


def test_a_shard_is_not_read_that_no_tensors_can_fill(tmp_path: Path) -> None:
    """A file without content may be as long as the manifest says, and takes no space."""
    directory = open_directory(str(tmp_path))
    save(directory, 1, {"model": {"weight": torch.arange(30.0)}}, 1)
    shard = tmp_path / path_in_step(1, shard_name(0, 1, GROUP))
    manifest = tmp_path / path_in_step(1, "manifest.json")
    old = manifests.from_json(manifest.read_bytes(), "")
    files = tuple(replace(f, size_bytes=2**43) if f.name == shard.name else f for f in old.files)
    manifest.write_bytes(manifests.to_json(replace(old, world_size=10**6, files=files)))
    os.truncate(shard, 2**43)
    with pytest.raises(CheckpointDamaged, match="the manifest lists shards of"):
        load(directory, 1)
