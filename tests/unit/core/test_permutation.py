"""A Permutation is a bijection, looks random, and never changes between versions."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.core.data_order import Permutation, epoch_key

ANY_KEY = st.integers(min_value=-(2**70), max_value=2**70)


def order(length: int, key: int) -> list[int]:
    permutation = Permutation(length, key=key)
    return [permutation[index] for index in range(length)]


@given(length=st.integers(0, 400), key=ANY_KEY)
@example(length=1023, key=1)
@example(length=1024, key=1)
@example(length=1025, key=1)
@example(length=4097, key=1)
@settings(max_examples=60, deadline=None)
def test_a_permutation_is_a_bijection_of_its_range(length: int, key: int) -> None:
    assert sorted(order(length, key)) == list(range(length))


@given(length=st.integers(1, 2**62), data=st.data(), key=ANY_KEY)
def test_values_are_in_range_and_distinct_at_any_length(
    length: int, data: st.DataObject, key: int
) -> None:
    indices = data.draw(st.sets(st.integers(0, length - 1), max_size=20))
    permutation = Permutation(length, key=key)
    values = {permutation[index] for index in indices}
    assert len(values) == len(indices)
    assert all(0 <= value < length for value in values)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_order_of_a_short_range_is_about_equally_likely(length: int) -> None:
    orders = math.factorial(length)
    expected = 30
    counts = Counter(tuple(order(length, key)) for key in range(expected * orders))
    assert len(counts) == orders
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    freedom = orders - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [1000, 1024, 10_007])
def test_neighbours_are_scattered(length: int) -> None:
    values = order(length, key=11)
    near = sum(abs(b - a) < length / 20 for a, b in itertools.pairwise(values))
    chance = 2 / 20 - 1 / 400
    deviation = math.sqrt(length * chance * (1 - chance))
    assert near == pytest.approx(length * chance, abs=4 * deviation)


@pytest.mark.parametrize("length", [1000, 10_007])
@pytest.mark.parametrize(("key", "other_key"), [(0, 1), (1, -1), (5, 5 + 2**64)])
def test_two_keys_agree_on_no_more_indices_than_chance(
    length: int, key: int, other_key: int
) -> None:
    agreeing = sum(
        a == b for a, b in zip(order(length, key), order(length, other_key), strict=True)
    )
    assert agreeing <= 6  # Poisson with mean 1: more has probability 1e-4, and the keys are fixed


def test_the_order_of_a_key_is_part_of_the_checkpoint_format() -> None:
    assert order(10, key=0) == [8, 3, 5, 2, 9, 6, 4, 7, 1, 0]
    long = Permutation(1_000_000, key=0)
    assert [long[index] for index in range(4)] == [438374, 505253, 546870, 487704]
    assert epoch_key(7, 3) == 11803713261774297446


def test_a_permutation_raises_outside_of_its_range_like_a_sequence() -> None:
    permutation = Permutation(10, key=0)
    assert len(permutation) == 10
    for index in (-1, 10):
        with pytest.raises(IndexError):
            permutation[index]
    with pytest.raises(ValueError, match="length"):
        Permutation(-1, key=0)


def test_epoch_keys_are_distinct_64_bit_numbers() -> None:
    keys = {epoch_key(seed, epoch) for seed in range(-20, 20) for epoch in range(40)}
    assert len(keys) == 40 * 40
    assert 2**63 < max(keys) < 2**64
    with pytest.raises(ValueError, match="epoch"):
        epoch_key(0, -1)


@given(
    length=st.integers(0, 5000) | st.integers(2**31, 2**40),
    key=st.integers(0, 2**64 - 1),
    spans=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 200)), max_size=5),
)
def test_take_returns_the_same_values_as_indexing(
    length: int, key: int, spans: list[tuple[int, int]]
) -> None:
    permutation = Permutation(length, key=key)
    inside = [range(min(start, length), min(start + size, length)) for start, size in spans]
    assert permutation.take(inside) == [[permutation[i] for i in span] for span in inside]


@pytest.mark.parametrize("beside", [[], [range(0, 60)]])
def test_take_outside_of_the_range_raises(beside: list[range]) -> None:
    for span in (range(0, 101), range(90, 140), range(-40, 10), range(95, 101)):
        with pytest.raises(IndexError):
            Permutation(100, key=1).take([*beside, span])
