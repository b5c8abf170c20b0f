"""A planner fetches an epoch's samples in order, from any position, with any loader processes."""

from __future__ import annotations

import os
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import data as torch_data

from elastic.core.data_order import DataPosition, advance
from elastic.errors import ConfigurationError
from elastic.worker.data_loader import BatchPlanner, DataLoader, to_device

LENGTH = 23
BEGIN = DataPosition()


class Squares(torch_data.Dataset[int]):
    """A dataset whose i-th sample is i * i, so that each sample tells its index."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


class Endless(torch_data.IterableDataset[int]):
    """A dataset without indices."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def fetched(
    loader: DataLoader, *, rank: int, world_size: int, position: DataPosition = BEGIN, epochs: int
) -> list[tuple[DataPosition, list[list[int]]]]:
    """Return for each step its position and the indices of this rank's weighted micro-batches."""
    planner = BatchPlanner(loader, position, rank=rank, world_size=world_size, epochs=epochs)
    steps = []
    try:
        while (plan := planner.next_plan()) is not None:
            assert plan.samples == loader.next_range(position, world_size)
            batches = []
            for micro_batch in plan.micro_batches:
                indices = [round(square**0.5) for square in planner.fetch().tolist()]
                assert len(indices) == len(micro_batch)
                if micro_batch.weighted:
                    batches.append(indices)
            steps.append((position, batches))
            position = advance(position, plan.samples)
        assert loader.next_range(position, world_size).epoch == epochs
        with pytest.raises(StopIteration):
            planner.fetch()
    finally:
        planner.close()
    return steps


def flat(steps: list[tuple[DataPosition, list[list[int]]]]) -> list[int]:
    return [index for _, batches in steps for batch in batches for index in batch]


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"global_batch": 10}])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("length", [LENGTH, 2100])  # an order is evaluated for 2048 samples at once
def test_all_ranks_together_fetch_the_permutation(
    options: dict[str, int], world_size: int, length: int
) -> None:
    loader = DataLoader(Squares(length), batch_size=2, seed=5, **options)
    by_rank = [
        fetched(loader, rank=rank, world_size=world_size, epochs=2) for rank in range(world_size)
    ]
    in_order = [
        index
        for steps in zip(*by_rank, strict=True)
        for _, batches in steps
        for batch in batches
        for index in batch
    ]
    expected = [loader.position_to_index(e)[i] for e in range(2) for i in range(length)]
    assert in_order == expected
    assert sorted(in_order[:length]) == list(range(length))
    assert in_order[:length] != in_order[length:]


def test_samples_come_in_the_order_of_the_dataset_without_shuffling() -> None:
    loader = DataLoader(Squares(), batch_size=4, shuffle=False)
    assert flat(fetched(loader, rank=0, world_size=1, epochs=1)) == list(range(LENGTH))


def test_the_order_depends_on_the_seed() -> None:
    orders = [
        flat(fetched(DataLoader(Squares(), seed=seed), rank=0, world_size=1, epochs=1))
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_new_planner_continues_exactly_at_its_position(world_size: int) -> None:
    loader = DataLoader(Squares(), batch_size=3, seed=1)
    whole = fetched(loader, rank=0, world_size=world_size, epochs=2)
    for number, (position, _) in enumerate(whole):
        rest = fetched(loader, rank=0, world_size=world_size, position=position, epochs=2)
        assert rest == whole[number:]


def test_loader_processes_fetch_the_same_samples() -> None:
    expected = fetched(DataLoader(Squares(), batch_size=3), rank=1, world_size=2, epochs=1)
    loader = DataLoader(Squares(), batch_size=3, num_workers=2, prefetch_factor=2)
    assert fetched(loader, rank=1, world_size=2, epochs=1) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_the_scripts_default_device_does_not_change_the_samples(workers: int) -> None:
    loader = DataLoader(Squares(), batch_size=3, num_workers=workers, collate_fn=list)
    expected = fetched(DataLoader(Squares(), batch_size=3), rank=1, world_size=2, epochs=1)
    planner = BatchPlanner(loader, BEGIN, rank=1, world_size=2, epochs=1)
    with torch.device("meta"):
        found = [planner.fetch() for batch in expected for _ in batch[1]]
    assert [[round(i**0.5) for i in b] for b in found] == [b for _, s in expected for b in s]
    planner.close()


class Noted(torch_data.Dataset[tuple[int, int]]):
    """Its samples tell a note of the script's, and the process that has loaded them."""

    note = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.note, os.getpid()


@pytest.mark.parametrize("stay", [False, True])
def test_loader_processes_live_for_an_epoch_and_know_what_was_changed_before_it(stay: bool) -> None:
    """As with torch's DataLoader."""
    dataset = Noted()
    loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=stay)
    planner = BatchPlanner(loader, BEGIN, rank=0, world_size=1, epochs=3)
    notes, processes = [], set()
    for epoch in range(3):
        dataset.note = epoch
        for _ in range(2):
            note, process = planner.fetch()
            notes += note.tolist()
            processes |= set(process.tolist())
    planner.close()
    assert notes == ([0] * 12 if stay else [0] * 4 + [1] * 4 + [2] * 4)
    assert len(processes) == (1 if stay else 3)


def rows_of(loader: DataLoader) -> list[Any]:
    planner = BatchPlanner(loader, BEGIN, rank=1, world_size=2, epochs=2)
    found = []
    while (plan := planner.next_plan()) is not None:
        found += [planner.fetch() for _ in plan.micro_batches]
    return found


def in_tensors(length: int = LENGTH) -> torch_data.TensorDataset:
    images = torch.randn(length, 3, 4, generator=torch.Generator().manual_seed(1))
    return torch_data.TensorDataset(images, torch.arange(length), images[:, 0, 0].clone() > 0)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 0, "collate_fn": None}, {"shuffle": False}]
)
def test_batches_of_a_tensor_dataset_equal_those_of_torchs_loader(options: dict[str, Any]) -> None:
    by_sample = {**options, "collate_fn": torch_data.default_collate}
    ours, theirs = (
        rows_of(DataLoader(in_tensors(), batch_size=3, **o)) for o in (options, by_sample)
    )
    assert len(ours) == len(theirs) == 8
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        for a, b in zip(mine, other, strict=True):
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            assert torch.equal(a, b)


def test_changing_a_batch_in_place_does_not_change_the_dataset() -> None:
    dataset = in_tensors()
    before = dataset.tensors[0].clone()
    for images, *_ in rows_of(DataLoader(dataset, batch_size=3)):
        images.zero_()
    assert torch.equal(dataset.tensors[0], before)


class Doubled(torch_data.TensorDataset):
    """A TensorDataset whose `__getitem__` a script has overridden."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * t for t in super().__getitem__(index))


def test_an_overridden_getitem_of_a_tensor_dataset_is_used() -> None:
    numbers = torch.arange(LENGTH)
    doubled = rows_of(DataLoader(Doubled(numbers), batch_size=3))
    plain = rows_of(DataLoader(torch_data.TensorDataset(numbers), batch_size=3))
    assert [b[0].tolist() for b in doubled] == [(2 * b[0]).tolist() for b in plain]


def test_an_unknown_option_is_refused_for_a_tensor_dataset_too() -> None:
    with pytest.raises(ConfigurationError, match="shuffled"):
        DataLoader(in_tensors(), shuffled=0)


def test_a_closed_planner_fetches_nothing() -> None:
    planner = BatchPlanner(DataLoader(Squares()), BEGIN, rank=0, world_size=1, epochs=1)
    planner.fetch()
    planner.close()
    with pytest.raises(StopIteration):
        planner.fetch()


def test_drop_last_drops_the_incomplete_batch_of_each_epoch() -> None:
    loader = DataLoader(Squares(), batch_size=4, drop_last=True)
    assert len(flat(fetched(loader, rank=0, world_size=1, epochs=2))) == 40


def test_drop_last_makes_an_epoch_one_step_in_a_group_too_large_for_the_data() -> None:
    loader = DataLoader(Squares(), batch_size=10, drop_last=True, shuffle=False)
    by_rank = [fetched(loader, rank=rank, world_size=3, epochs=2) for rank in range(3)]
    assert [len(steps) for steps in by_rank] == [2, 2, 2]
    assert sorted(index for steps in by_rank for index in flat(steps[:1])) == list(range(LENGTH))


def test_drop_last_goes_on_in_the_next_epoch_in_a_group_that_grew_too_large() -> None:
    loader = DataLoader(Squares(), batch_size=10, drop_last=True)
    samples = loader.next_range(DataPosition(cursor=10), 3)
    assert (samples.epoch, samples.start, samples.stop) == (1, 0, LENGTH)


def test_the_batch_ratio_follows_the_batch_policy() -> None:
    assert DataLoader(Squares(), batch_size=2).batch_ratio(3, reference_world=1) == 3.0
    assert DataLoader(Squares(), global_batch=8).batch_ratio(3, reference_world=1) == 1.0


def test_the_batch_ratio_is_limited_by_the_length_of_the_dataset() -> None:
    assert DataLoader(Squares(), batch_size=10).batch_ratio(3, reference_world=1) == 2.3
    assert DataLoader(Squares(), batch_size=30).batch_ratio(3, reference_world=1) == 1.0


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Endless(), {}, r"Endless is an IterableDataset"),
        (Squares(0), {}, r"Squares.*empty"),
        (Squares(), {"sampler": [0]}, r"sampler cannot be given"),
        (Squares(), {"batch_sampler": [[0]]}, r"batch_sampler cannot be given"),
        (Squares(), {"num_worker": 2}, r"elastic\.DataLoader: .*unexpected.*num_worker"),
        (Squares(), {"persistent_workers": True}, r"elastic\.DataLoader: .*num_workers > 0"),
        (Squares(), {"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        (Squares(), {"accumulate": 0}, r"accumulate must be at least 1, got 0"),
        (Squares(), {"global_batch": 4, "accumulate": 2}, r"accumulate=2 and global_batch=4"),
        (Squares(), {"global_batch": 24, "drop_last": True}, r"23 samples.*24.*drop_last"),
        (
            Squares(),
            {"batch_size": 6, "accumulate": 4, "drop_last": True},
            r"23 samples.*24.*accumulate.*drop_last",
        ),
    ],
)
def test_wrong_datasets_and_options_are_refused_with_the_reason(
    dataset: torch_data.Dataset[Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DataLoader(dataset, **options)


def test_a_position_outside_the_dataset_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sample 24.*has 23"):
        DataLoader(Squares()).next_range(DataPosition(epoch=0, cursor=24), 1)


Pair = namedtuple("Pair", "left right")


def test_nested_batches_are_moved_to_the_device() -> None:
    one = torch.zeros(1)
    batch = {"a": one, "b": [one, (one, "text")], "c": Pair(one, 3)}
    assert to_device(batch, torch.device("cpu")) is batch
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][1][0].is_meta
    assert moved["b"][1][1] == "text"
    assert isinstance(moved["c"], Pair)
    assert moved["c"].left.is_meta
    assert moved["c"].right == 3


def test_a_batch_with_a_to_method_moves_itself() -> None:
    """Lengths of a packed sequence stay on the CPU, whatever the device."""
    packed = pack_sequence([torch.zeros(2), torch.zeros(1)])
    moved = to_device(packed, torch.device("meta"))
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


class Filled:
    """A batch whose `to` moves it in place and returns nothing."""

    def __init__(self) -> None:
        self.data = torch.zeros(1)

    def to(self, device: torch.device) -> None:
        self.data = self.data.to(device)


def test_a_batch_that_moves_itself_in_place_is_kept() -> None:
    batch = Filled()
    assert to_device([batch], torch.device("meta")) == [batch]
    assert batch.data.is_meta


class Length:
    """A number whose `to` converts its unit, as in several packages."""

    def to(self, unit: str) -> str:
        return unit + "!"


class Message(dict[str, Any]):
    """A dictionary whose keys are attributes, by the common recipe: a missing one is a KeyError."""

    __getattr__ = dict.__getitem__


@dataclass
class Letter:
    to: Any
    text: str


Call = namedtuple("Call", "to data")


@pytest.mark.parametrize(
    "item",
    [Length(), Letter(len, "a"), torch.Tensor, nn.Linear, "text", Message(to=len)],
    ids=["unit", "field", "class", "module", "text", "key"],
)
def test_an_item_whose_to_takes_no_device_stays_as_it_is(item: Any) -> None:
    tensor, moved = to_device([torch.zeros(1), item], torch.device("meta"))
    assert tensor.is_meta
    assert moved == item


def noted() -> Message:
    message = Message(data=torch.zeros(1))
    vars(message)["note"] = 1
    return message


@pytest.mark.parametrize(
    "batch",
    [Message(data=torch.zeros(1)), noted(), Call(len, torch.zeros(1))],
    ids=["dictionary", "with an attribute", "tuple"],
)
def test_batches_with_keys_or_fields_as_attributes_are_moved(batch: Any) -> None:
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert moved.data.is_meta


@pytest.mark.parametrize("kind", [UserDict, OrderedDict, partial(defaultdict, list)])
def test_batches_in_mappings_of_any_type_are_moved(kind: Any) -> None:
    batch = kind({"a": torch.zeros(1), "b": "text"})
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    assert moved["a"].is_meta
    assert moved["b"] == "text"
    assert not batch["a"].is_meta


@dataclass
class Sample:
    inputs: Any
    number: int = 3


@dataclass(frozen=True, slots=True)
class Fixed:
    inputs: Any
    number: int = 3


@pytest.mark.parametrize("kind", [Sample, Fixed])
def test_batches_in_data_classes_are_moved(kind: Any) -> None:
    batch = kind([torch.zeros(1)])
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is kind
    assert moved.inputs[0].is_meta
    assert moved.number == 3
    assert not batch.inputs[0].is_meta


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_len_is_the_number_of_steps_in_an_epoch_with_a_fixed_global_batch(
    drop_last: bool, steps: int
) -> None:
    data = DataLoader(list(range(10)), batch_size=2, global_batch=4, drop_last=drop_last)
    assert len(data) == steps


def test_len_is_refused_with_advice_before_the_group_has_formed() -> None:
    data = DataLoader(list(range(10)), batch_size=2)
    assert data
    with pytest.raises(TypeError, match=r"steps_per_epoch.*global_batch"):
        len(data)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [5, 3, 2, 2, 1]),
        ({"accumulate": 2}, [3, 2, 1, 1, 1]),
        ({"drop_last": True}, [5, 2, 1, 1, 1]),
        ({"global_batch": 5}, [2, 2, 2, 2, 2]),
    ],
    ids=str,
)
def test_the_steps_of_an_epoch_are_told_for_any_world_size(
    options: dict[str, Any], steps: list[int]
) -> None:
    data = DataLoader(list(range(10)), batch_size=2, **options)
    assert [data.steps_per_epoch(workers) for workers in range(1, 6)] == steps
    for workers, count in enumerate(steps, 1):
        assert len(fetched(data, rank=0, world_size=workers, epochs=1)) == count


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2", True, None], ids=repr)
def test_steps_of_an_epoch_need_a_number_of_workers(workers: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"steps_per_epoch\(.*number of workers"):
        DataLoader(list(range(10))).steps_per_epoch(workers)


def test_iterating_over_the_loader_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"torch\.utils\.data\.DataLoader"):
        iter(DataLoader(list(range(10))))


@pytest.mark.parametrize(
    "name", ["dataset", "batch_size", "seed", "shuffle", "accumulate", "global_batch", "drop_last"]
)
def test_constructor_arguments_cannot_be_set_later(name: str) -> None:
    """torch's loader refuses that too. Here it would have no effect, or mix a new dataset with the
    old one's length."""
    data = DataLoader(Squares(), batch_size=2)
    with pytest.raises(ConfigurationError, match=f"{name} of .* create another"):
        setattr(data, name, 3)
    data.of_the_scripts = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH + 1])
def test_a_dataset_whose_length_changes_between_epochs_is_refused(
    length: int, workers: int
) -> None:
    dataset = Squares()
    loader = DataLoader(dataset, batch_size=LENGTH, num_workers=workers)
    planner = BatchPlanner(loader, BEGIN, rank=0, world_size=1, epochs=20)
    planner.fetch()
    dataset.length = length
    with pytest.raises(ConfigurationError, match=f"had 23 samples .* has {length} now"):
        [planner.fetch() for _ in range(10)]  # some batches are fetched ahead
    planner.close()
