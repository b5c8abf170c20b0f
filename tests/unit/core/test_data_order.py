"""Each sample is consumed once and the gradient is right at any sequence of world sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data_order import (
    BatchPolicy,
    DataPosition,
    FixedGlobalBatch,
    MicroBatch,
    PerWorkerBatch,
    SampleRange,
    advance,
    loss_weight,
    micro_batches,
    next_range,
    numbers_of_passes,
    share,
    steps_in_epoch,
)

WORLD_SIZES = st.integers(1, 9)
BATCH_SIZES = st.integers(1, 8)
POLICIES = st.one_of(
    st.builds(PerWorkerBatch, batch_size=BATCH_SIZES, accumulate=st.integers(1, 3)),
    st.builds(FixedGlobalBatch, batch_size=BATCH_SIZES, size=st.integers(1, 40)),
)
RANGES = st.builds(
    lambda epoch, start, length: SampleRange(epoch=epoch, start=start, stop=start + length),
    st.integers(0, 3),
    st.integers(0, 100),
    st.integers(1, 60),
)


def divided(
    samples: SampleRange, world_size: int, batch_size: int, *, equal: bool = False
) -> list[tuple[MicroBatch, ...]]:
    return [
        micro_batches(samples, rank=rank, world_size=world_size, batch_size=batch_size, equal=equal)
        for rank in range(world_size)
    ]


def weighted_positions(ranks: list[tuple[MicroBatch, ...]]) -> list[int]:
    return [
        position
        for rank in ranks
        for micro_batch in rank
        if micro_batch.weighted
        for position in range(micro_batch.start, micro_batch.stop)
    ]


@given(policy=POLICIES, length=st.integers(1, 150), data=st.data())
def test_each_position_is_consumed_once_at_any_sequence_of_world_sizes(
    policy: BatchPolicy, length: int, data: st.DataObject
) -> None:
    position, consumed = DataPosition(), []
    while position.cursor < length:
        world_size = data.draw(WORLD_SIZES)
        global_batch = policy.global_batch(world_size)
        samples = next_range(position, length=length, global_batch=global_batch)
        assert 1 <= len(samples) <= global_batch
        consumed += weighted_positions(divided(samples, world_size, policy.batch_size))
        position = advance(position, samples)
    assert consumed == list(range(length))
    assert position.epoch == 0
    opening = next_range(position, length=length, global_batch=length + 1)
    assert opening == SampleRange(epoch=1, start=0, stop=length)


@given(length=st.integers(2, 150), data=st.data())
def test_a_step_has_one_sample_only_if_the_group_takes_no_more_than_two(
    length: int, data: st.DataObject
) -> None:
    position = DataPosition()
    while position.cursor < length:
        global_batch = data.draw(st.integers(1, 30))
        left = length - position.cursor
        samples = next_range(position, length=length, global_batch=global_batch)
        if global_batch > 2 and left > 1:
            assert len(samples) >= 2
            assert left - len(samples) != 1
            assert len(samples) >= min(left, global_batch) - 1
        position = advance(position, samples)


@given(length=st.integers(1, 100), global_batch=st.integers(1, 30), drop_last=st.booleans())
def test_steps_in_epoch_counts_the_ranges_of_an_epoch(
    length: int, global_batch: int, drop_last: bool
) -> None:
    steps = steps_in_epoch(length=length, global_batch=global_batch, drop_last=drop_last)
    position, epochs = DataPosition(), []
    for _ in range(steps + 1):
        samples = next_range(
            position, length=length, global_batch=global_batch, drop_last=drop_last
        )
        assert not drop_last or len(samples) == min(global_batch, length)
        epochs.append(samples.epoch)
        position = advance(position, samples)
    assert epochs == [0] * steps + [1]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_without_samples_has_no_steps(drop_last: bool) -> None:
    assert steps_in_epoch(length=0, global_batch=4, drop_last=drop_last) == 0
    with pytest.raises(ValueError, match="length"):
        next_range(DataPosition(), length=0, global_batch=4, drop_last=drop_last)


@given(samples=RANGES, world_size=WORLD_SIZES, batch_size=BATCH_SIZES)
def test_shares_cover_the_range_in_rank_order_and_are_balanced(
    samples: SampleRange, world_size: int, batch_size: int
) -> None:
    shares = [
        share(samples, rank=rank, world_size=world_size, batch_size=batch_size)
        for rank in range(world_size)
    ]
    assert [i for part in shares for i in range(part.start, part.stop)] == list(
        range(samples.start, samples.stop)
    )
    sizes = [len(part) for part in shares]
    taking = [size for size in sizes if size]
    assert sizes[: len(taking)] == taking == sorted(taking, reverse=True)
    units = [math.ceil(size / 2) if batch_size == 2 else size for size in taking]
    assert units[0] - units[-1] <= 1
    if batch_size > 2 and len(samples) >= 2:
        assert len(taking) == min(world_size, len(samples) // 2)


@given(samples=RANGES, world_size=WORLD_SIZES, batch_size=BATCH_SIZES)
def test_a_rank_with_samples_never_gets_a_stand_in(
    samples: SampleRange, world_size: int, batch_size: int
) -> None:
    ranks = divided(samples, world_size, batch_size)
    for rank in ranks:
        assert all(p.weighted for p in rank) or [p.weighted for p in rank] == [False]
        sizes = [len(micro_batch) for micro_batch in rank]
        assert all(1 <= size <= batch_size for size in sizes)
        assert max(sizes) - min(sizes) <= 1
    numbers = [len(rank) for rank in ranks]
    found = numbers_of_passes(len(samples), world_size=world_size, batch_size=batch_size)
    assert found == (min(numbers), max(numbers))


@given(samples=RANGES, world_size=WORLD_SIZES, batch_size=BATCH_SIZES)
def test_stand_ins_make_the_numbers_of_passes_equal_where_that_is_asked_for(
    samples: SampleRange, world_size: int, batch_size: int
) -> None:
    equal = divided(samples, world_size, batch_size, equal=True)
    largest = share(samples, rank=0, world_size=world_size, batch_size=batch_size)
    assert {len(rank) for rank in equal} == {math.ceil(len(largest) / batch_size)}
    for rank, unequal in zip(equal, divided(samples, world_size, batch_size), strict=True):
        assert [p for p in rank if p.weighted] == [p for p in unequal if p.weighted]
        flags = [p.weighted for p in rank]
        assert flags == sorted(flags, reverse=True)


@given(samples=RANGES, world_size=WORLD_SIZES, batch_size=st.integers(2, 8))
def test_no_pass_has_a_single_sample_where_that_can_be_avoided(
    samples: SampleRange, world_size: int, batch_size: int
) -> None:
    passes = [p for rank in divided(samples, world_size, batch_size, equal=True) for p in rank]
    single = [p for p in passes if len(p) == 1]
    if len(samples) == 1:
        assert len(single) == len(passes)
    elif batch_size == 2 and len(samples) % 2 == 1:
        assert [p.weighted for p in single] == [True]
    else:
        assert not single


@given(samples=RANGES, world_size=WORLD_SIZES, batch_size=BATCH_SIZES, data=st.data())
def test_weights_make_the_averaged_gradient_the_mean_over_the_global_batch(
    samples: SampleRange, world_size: int, batch_size: int, data: st.DataObject
) -> None:
    """The loss of sample i is w * x[i], so its gradient is x[i]; DDP averages over ranks."""
    gradients = data.draw(
        st.lists(st.integers(-1000, 1000), min_size=len(samples), max_size=len(samples))
    )

    def weighted_mean(micro_batch: MicroBatch) -> float:
        part = gradients[micro_batch.start - samples.start : micro_batch.stop - samples.start]
        return loss_weight(micro_batch, samples, world_size=world_size) * sum(part) / len(part)

    equal = data.draw(st.booleans())
    by_rank = [
        sum(map(weighted_mean, rank))
        for rank in divided(samples, world_size, batch_size, equal=equal)
    ]
    assert sum(by_rank) / world_size == pytest.approx(sum(gradients) / len(samples), abs=1e-9)


@given(world_size=WORLD_SIZES, batch_size=BATCH_SIZES)
def test_the_weight_of_equal_undivided_shares_is_exactly_one(
    world_size: int, batch_size: int
) -> None:
    samples = SampleRange(epoch=0, start=5, stop=5 + world_size * batch_size)
    for (micro_batch,) in divided(samples, world_size, batch_size):
        assert loss_weight(micro_batch, samples, world_size=world_size) == 1.0


@pytest.mark.parametrize(
    ("samples", "batch_size", "stand_in_stop"),
    [
        (SampleRange(epoch=0, start=10, stop=13), 8, 12),
        (SampleRange(epoch=0, start=10, stop=11), 8, 11),
        (SampleRange(epoch=0, start=10, stop=13), 1, 11),
    ],
    ids=["two samples", "all there are", "no more than batch_size"],
)
def test_a_rank_without_samples_gets_a_stand_in_of_weight_zero(
    samples: SampleRange, batch_size: int, stand_in_stop: int
) -> None:
    (stand_in,) = micro_batches(samples, rank=3, world_size=4, batch_size=batch_size)
    assert stand_in == MicroBatch(start=10, stop=stand_in_stop, weighted=False)
    assert loss_weight(stand_in, samples, world_size=4) == 0.0


@pytest.mark.parametrize(
    ("samples", "world_size", "batch_size", "expected"),
    [
        (4, 3, 8, [[2], [2], ["stand-in"]]),
        (3, 2, 8, [[3], ["stand-in"]]),
        (5, 2, 3, [[3], [2]]),
        (7, 2, 3, [[2, 2], [3]]),
        (6, 2, 2, [[2, 2], [2]]),
        (3, 2, 1, [[1, 1], [1]]),
        (3, 3, 1, [[1], [1], [1]]),
    ],
)
def test_small_steps_are_dealt_in_batches_that_batch_norm_accepts(
    samples: int, world_size: int, batch_size: int, expected: list[list[int | str]]
) -> None:
    ranks = divided(SampleRange(epoch=0, start=0, stop=samples), world_size, batch_size)
    found = [[len(p) if p.weighted else "stand-in" for p in rank] for rank in ranks]
    assert found == expected


def test_only_the_batch_of_the_per_worker_policy_grows_with_the_group() -> None:
    growing = PerWorkerBatch(batch_size=8, accumulate=3)
    fixed = FixedGlobalBatch(batch_size=8, size=100)
    assert [growing.global_batch(world_size) for world_size in (1, 4)] == [24, 96]
    assert [fixed.global_batch(world_size) for world_size in (1, 4)] == [100, 100]


def test_a_short_remainder_is_a_step_or_is_dropped() -> None:
    position = DataPosition(epoch=2, cursor=8)
    short = next_range(position, length=10, global_batch=4)
    assert short == SampleRange(epoch=2, start=8, stop=10)
    dropped = next_range(position, length=10, global_batch=4, drop_last=True)
    assert dropped == SampleRange(epoch=3, start=0, stop=4)
    assert advance(position, dropped) == DataPosition(epoch=3, cursor=4)


def test_a_remainder_of_one_sample_gets_another_unless_it_is_dropped() -> None:
    position = DataPosition(cursor=5)
    shortened = next_range(position, length=10, global_batch=4)
    assert shortened == SampleRange(epoch=0, start=5, stop=8)
    rest = next_range(advance(position, shortened), length=10, global_batch=4)
    assert rest == SampleRange(epoch=0, start=8, stop=10)
    full = next_range(position, length=10, global_batch=4, drop_last=True)
    assert full == SampleRange(epoch=0, start=5, stop=9)


def test_a_group_too_large_for_the_data_takes_one_epoch_per_step() -> None:
    whole = next_range(DataPosition(), length=10, global_batch=16, drop_last=True)
    assert whole == SampleRange(epoch=0, start=0, stop=10)
    following = next_range(DataPosition(cursor=8), length=10, global_batch=16, drop_last=True)
    assert following == SampleRange(epoch=1, start=0, stop=10)


@pytest.mark.parametrize(
    ("samples"),
    [
        SampleRange(epoch=1, start=3, stop=8),
        SampleRange(epoch=1, start=5, stop=8),
        SampleRange(epoch=1, start=0, stop=8),
        SampleRange(epoch=2, start=4, stop=8),
        SampleRange(epoch=3, start=0, stop=8),
    ],
    ids=["repeats", "skips", "starts over", "skips in the next epoch", "skips an epoch"],
)
def test_a_range_that_does_not_follow_the_position_is_refused(samples: SampleRange) -> None:
    with pytest.raises(ValueError, match="must follow"):
        advance(DataPosition(epoch=1, cursor=4), samples)


SAMPLES = SampleRange(epoch=0, start=0, stop=4)
NO_SAMPLES = SampleRange(epoch=0, start=4, stop=4)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: DataPosition(cursor=-1), "cursor"),
        (lambda: SampleRange(epoch=0, start=3, stop=2), "stop"),
        (lambda: PerWorkerBatch(batch_size=0), "batch_size"),
        (lambda: FixedGlobalBatch(batch_size=1, size=0), "size"),
        (lambda: PerWorkerBatch(batch_size=1).global_batch(0), "world_size"),
        (lambda: next_range(DataPosition(cursor=5), length=4, global_batch=1), "cursor"),
        (lambda: next_range(DataPosition(), length=4, global_batch=0), "global_batch"),
        (lambda: share(SAMPLES, rank=2, world_size=2, batch_size=1), "world_size"),
        (lambda: share(SAMPLES, rank=0, world_size=2, batch_size=0), "batch_size"),
        (lambda: micro_batches(SAMPLES, rank=0, world_size=1, batch_size=0), "batch_size"),
        (lambda: micro_batches(NO_SAMPLES, rank=0, world_size=1, batch_size=1), "samples"),
    ],
)
def test_an_error_names_the_impossible_argument(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()
