"""A replicated state is divided into one shard a member and written as safetensors."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import open_directory
from elastic.checkpoint.layout import path_in_step, shard_name
from elastic.worker.state.shards import Piece, copy_share, load, plan_shards, safetensors_blocks
from elastic.worker.state.tensor_specs import REAL_PART, TensorSpec, describe
from elastic.worker.state.tree import flatten, unflatten
from tests.unit.worker.saving import GROUP, make_state, save
from tests.unit.worker.trees import DTYPES, make_tensor, same, same_tensor

_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def _specs(dtypes: st.SearchStrategy[torch.dtype]) -> st.SearchStrategy[list[TensorSpec]]:
    rows = st.lists(st.tuples(dtypes, _shapes), max_size=8)
    return rows.map(
        lambda rows: [
            TensorSpec(name=str(i), dtype=str(dtype).removeprefix("torch."), shape=shape)
            for i, (dtype, shape) in enumerate(rows)
        ]
    )


def _shares_bytes(specs: list[TensorSpec], count: int) -> list[int]:
    width = {spec.name: spec.element_bytes for spec in specs}
    return [
        sum((piece.stop - piece.start) * width[piece.name] for piece in shard)
        for shard in plan_shards(specs, count)
    ]


@given(
    _specs(st.sampled_from(DTYPES)),
    st.integers(1, 9),
    st.lists(st.integers(0, 500), min_size=2, max_size=2),
)
def test_state_whose_size_differs_between_writers_is_in_shard_0_and_moves_no_cut(
    specs: list[TensorSpec], count: int, sizes: list[int]
) -> None:
    plans = []
    for size in sizes:
        own = TensorSpec(name="a meter", dtype="float32", shape=(size,))
        plans.append(
            plan_shards([own, *specs], count, frozenset({"a meter"}), frozenset({own.name}))
        )
        assert plans[-1][0][0] == Piece(name="a meter", start=0, stop=size, whole=True)
    first, second = plans
    assert first[0][1:] == second[0][1:]
    assert first[1:] == second[1:]
    assert [first[0][1:], *first[1:]] == list(plan_shards(specs, count))


@given(_specs(st.sampled_from(DTYPES)), st.integers(1, 9))
def test_every_element_is_in_exactly_one_shard(specs: list[TensorSpec], count: int) -> None:
    shards = plan_shards(specs, count)
    assert len(shards) == count
    for spec in specs:
        pieces = [piece for shard in shards for piece in shard if piece.name == spec.name]
        assert pieces[0].start == 0
        assert pieces[-1].stop == spec.element_count
        for before, after in itertools.pairwise(pieces):
            assert before.stop == after.start
        assert all(piece.stop > piece.start for piece in pieces) or spec.element_count == 0
        assert [piece.whole for piece in pieces] == [len(pieces) == 1] * len(pieces)


@given(_specs(st.sampled_from(DTYPES)), st.integers(1, 9))
def test_shard_sizes_are_within_one_element_of_equal(specs: list[TensorSpec], count: int) -> None:
    widest = max((spec.element_bytes for spec in specs), default=0)
    equal = sum(spec.size_bytes for spec in specs) / count
    assert all(abs(share - equal) <= widest for share in _shares_bytes(specs, count))


@given(_specs(st.just(torch.float64)), st.integers(1, 9))
def test_shards_of_one_type_differ_by_0_or_1_elements(specs: list[TensorSpec], count: int) -> None:
    shares = _shares_bytes(specs, count)
    assert max(shares) - min(shares) <= torch.float64.itemsize


@given(_specs(st.sampled_from(DTYPES)), st.integers(1, 9), st.data())
def test_state_that_differs_between_writers_is_in_the_first_shard(
    specs: list[TensorSpec], count: int, data: st.DataObject
) -> None:
    names = [spec.name for spec in specs]
    local = frozenset(name for name in names if data.draw(st.booleans()))
    shards = plan_shards(specs, count, local)
    owners = {
        name: [i for i, s in enumerate(shards) for p in s if p.name == name] for name in names
    }
    assert all(owners[name] == [0] for name in local)
    assert all(piece.whole for piece in shards[0] if piece.name in local)
    width = {spec.name: spec.element_bytes for spec in specs}
    sizes = [sum((p.stop - p.start) * width[p.name] for p in shard) for shard in shards]
    assert sum(sizes) == sum(spec.size_bytes for spec in specs)
    local_bytes = sum(spec.size_bytes for spec in specs if spec.name in local)
    widest = max(width.values(), default=0)
    if local_bytes * count <= sum(sizes):
        assert max(sizes) - min(sizes) <= 2 * widest
    else:
        assert sizes[0] - local_bytes <= widest
        assert max(sizes[1:], default=0) - min(sizes[1:], default=0) <= 2 * widest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (7,), (2, 3)], ids=str)
def test_the_library_reads_a_written_shard(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"odd": make_tensor(torch.uint8, (3,)), "x": make_tensor(dtype, shape)}
    share = copy_share(tensors, plan_shards(describe(tensors), 1)[0])
    stored = safetensors.torch.load(b"".join(safetensors_blocks(share.tensors, {})))
    assert same_tensor(stored["odd"], tensors["odd"])
    expected = torch.view_as_real(tensors["x"]) if dtype in REAL_PART else tensors["x"]
    assert same_tensor(stored["x"], expected)


def test_a_whole_tensor_keeps_its_shape_and_a_split_one_is_flat() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(3, 2)}
    first, second = (copy_share(tensors, p) for p in plan_shards(describe(tensors), 2))
    assert first.tensors["a"].shape == (2, 3)
    assert first.slices == second.slices == {}
    middle = copy_share(tensors, plan_shards(describe(tensors), 3)[1])
    assert middle.tensors["a"].tolist() == [4, 5]
    assert middle.tensors["b"].tolist() == [0, 1]
    assert middle.slices == {"a": (4, 6), "b": (0, 2)}


@given(st.integers(1, 4), st.integers(0, 3))
def test_a_copy_does_not_follow_the_live_state(count: int, index: int) -> None:
    tensors = {"a": torch.zeros(9, requires_grad=True), "b": torch.zeros(3, 3).t()}
    share = copy_share(tensors, plan_shards(describe(tensors), count)[index % count])
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(1)
    assert all(not copy.any() and not copy.requires_grad for copy in share.tensors.values())


def test_memory_of_an_earlier_share_is_reused_where_it_fits() -> None:
    earlier = copy_share(*_one_shard(a=torch.zeros(4), b=torch.zeros(2), c=torch.zeros(2)))
    live = {"a": torch.arange(4.0), "b": torch.arange(3.0), "d": torch.ones(1)}
    live["c"] = torch.tensor([1, 2])  # of another type than before
    share = copy_share(*_one_shard(**live), reuse=earlier)
    assert all(same_tensor(share.tensors[name], live[name]) for name in live)
    assert share.tensors.keys() == live.keys()
    used = [name for name in live if share.tensors[name] is earlier.tensors.get(name)]
    assert used == ["a"]


def test_a_default_device_set_by_the_script_does_not_affect_checkpoints(tmp_path: Path) -> None:
    state, directory = make_state(1), open_directory(str(tmp_path))
    with torch.device("meta"):
        save(directory, 1, state, 3)
        loaded = load(directory, 1)
    assert same(unflatten(loaded.structure.skeleton, loaded.tensors), state)


def _one_shard(**tensors: torch.Tensor) -> tuple[dict[str, torch.Tensor], tuple[Piece, ...]]:
    return tensors, plan_shards(describe(tensors), 1)[0]


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    x = torch.tensor([1 + 2j])
    tensors = {"conjugate": x.conj(), "negative": x.conj().imag}
    share = copy_share(tensors, plan_shards(describe(tensors), 1)[0])
    stored = safetensors.torch.load(b"".join(safetensors_blocks(share.tensors, {})))
    assert stored["conjugate"].tolist() == [[1, -2]]
    assert stored["negative"].tolist() == [-2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 40])
def test_any_number_of_shards_loads_the_same(tmp_path: Path, count: int) -> None:
    directory, state = open_directory(str(tmp_path)), make_state(7)
    save(directory, 12, state, count)
    assert catalog.verify(directory, 12) == []
    loaded = load(directory, 12)
    assert loaded.manifest.world_size == count
    assert loaded.structure.extra == {"note": "kept"}
    assert describe(loaded.tensors) == loaded.structure.specs == describe(flatten(state).tensors)
    assert same(unflatten(loaded.structure.skeleton, loaded.tensors), state)


def test_the_shares_of_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    """A survivor may write the share of a worker that only seemed dead."""
    for name in ("one", "two"):
        save(open_directory(str(tmp_path / name)), 1, make_state(7), 3)
    shard = path_in_step(1, shard_name(1, 3, GROUP))
    assert (tmp_path / "one" / shard).read_bytes() == (tmp_path / "two" / shard).read_bytes()
