"""Which positions of an epoch's order each step, rank and micro-batch consumes, and their weight.

The state of the data is a DataPosition, whatever the world size: a step takes the next
`global_batch` positions, and only then are they dealt to the ranks of the moment. So a change of
world size neither repeats nor skips a sample.

BatchNorm refuses a batch with one value per channel in training. So no step, share or micro-batch
has a single sample where that can be avoided; a rank that is left without samples gets a stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

_LEAST_SAMPLES = 2  # of a batch that BatchNorm accepts


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """How far the data is consumed: `cursor` samples of epoch `epoch`, both from 0."""

    epoch: int = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.cursor < 0:  # at every step, and calls cost
            _require_at_least("epoch", self.epoch, 0)
            _require_at_least("cursor", self.cursor, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRange:
    """Positions [start, stop) of the order of epoch `epoch`: a step's samples or a rank's share."""

    epoch: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or not 0 <= self.start <= self.stop:
            _require_at_least("epoch", self.epoch, 0)
            _require_at_least("start", self.start, 0)
            _require_at_least("stop", self.stop, self.start)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Positions [start, stop) of one forward and backward pass; a stand-in is not `weighted`."""

    start: int
    stop: int
    weighted: bool

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class PerWorkerBatch:
    """A step has `accumulate` micro-batches of `batch_size` samples from every worker.

    ValueError unless both are at least 1.
    """

    batch_size: int
    accumulate: int = 1

    def __post_init__(self) -> None:
        _require_at_least("batch_size", self.batch_size, 1)
        _require_at_least("accumulate", self.accumulate, 1)

    def global_batch(self, world_size: int) -> int:
        """Samples per step of a group of `world_size` workers."""
        _require_at_least("world_size", world_size, 1)
        return self.batch_size * self.accumulate * world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedGlobalBatch:
    """A step has `size` samples at any world size; a micro-batch has at most `batch_size`.

    ValueError unless both are at least 1.
    """

    batch_size: int
    size: int

    def __post_init__(self) -> None:
        _require_at_least("batch_size", self.batch_size, 1)
        _require_at_least("size", self.size, 1)

    def global_batch(self, world_size: int) -> int:
        """Samples per step of a group of `world_size` workers: `size`, for any of them."""
        _require_at_least("world_size", world_size, 1)
        return self.size


BatchPolicy: TypeAlias = PerWorkerBatch | FixedGlobalBatch


def next_range(
    position: DataPosition, *, length: int, global_batch: int, drop_last: bool = False
) -> SampleRange:
    """The samples of the step after `position`; never empty, never more than one epoch has.

    An epoch's last step has what is left of `length` samples. Where that would be a single one,
    the step before it leaves it a second. With `drop_last` a remainder is skipped and the step
    comes from the next epoch. ValueError if the position lies outside the data.
    """
    _require_at_least("length", length, 1)
    size = _effective(global_batch, length)
    left = length - position.cursor
    if left < 0:
        raise ValueError(f"cursor must be at most the length {length}, got {position.cursor}")
    if left < (size if drop_last else 1):
        position, left = DataPosition(epoch=position.epoch + 1), length
    if left == size + 1 and size > _LEAST_SAMPLES and not drop_last:
        size -= 1
    stop = position.cursor + min(size, left)
    return SampleRange(epoch=position.epoch, start=position.cursor, stop=stop)


def advance(position: DataPosition, samples: SampleRange) -> DataPosition:
    """The position after the step that consumed `samples`.

    ValueError unless `samples` follows `position` directly or opens the next epoch.
    """
    follows = samples.epoch == position.epoch and samples.start == position.cursor
    if not follows and (samples.epoch, samples.start) != (position.epoch + 1, 0):
        raise ValueError(f"samples must follow {position}, got {samples}")
    return DataPosition(epoch=samples.epoch, cursor=samples.stop)


def steps_in_epoch(*, length: int, global_batch: int, drop_last: bool = False) -> int:
    """Steps that a whole epoch of `length` samples takes at a constant `global_batch`."""
    _require_at_least("length", length, 0)
    if length == 0:
        return 0
    size = _effective(global_batch, length)
    return length // size if drop_last else -(-length // size)


def share(samples: SampleRange, *, rank: int, world_size: int, batch_size: int) -> SampleRange:
    """The part of `samples` that `rank` (from 0) takes; empty if there are too few.

    The shares of all ranks are contiguous, in rank order and differ by at most one sample (with
    batches of two by a pair), the larger ones first. None has a single sample where that can be
    avoided. ValueError unless 0 <= rank < world_size.
    """
    _require_at_least("rank", rank, 0)
    _require_at_least("world_size", world_size, rank + 1)
    _require_at_least("batch_size", batch_size, 1)
    start, stop = _piece(samples.start, samples.stop, rank, world_size, batch_size)
    return SampleRange(epoch=samples.epoch, start=start, stop=stop)


def micro_batches(
    samples: SampleRange, *, rank: int, world_size: int, batch_size: int
) -> tuple[MicroBatch, ...]:
    """The passes of `rank` over its share, none larger than `batch_size`.

    Every rank gets ceil(largest share / batch_size) of them, since SyncBatchNorm and a static graph
    need as many forward passes everywhere. None has a single sample, unless `batch_size` is 1, or
    the step has one sample, or it is 2 and the step has an odd number. A rank that runs out of
    samples gets stand-ins: the first samples of the step once more, to be weighted zero.
    ValueError if `samples` is empty or `rank` is not below `world_size`.
    """
    begin = samples.start
    return tuple(
        MicroBatch(start=begin + first, stop=begin + last, weighted=weighted)
        for first, last, weighted in _passes(len(samples), rank, world_size, batch_size)
    )


def loss_weight(micro_batch: MicroBatch, samples: SampleRange, *, world_size: int) -> float:
    """The factor on the micro-batch's mean loss that makes the averaged gradient exact.

    A rank sums the gradients of its micro-batches and DDP divides the sum over ranks by
    `world_size`; with n * world_size / len(samples) for a micro-batch of n samples, what comes out
    is the mean over all of `samples`. Exactly 1.0 where shares are equal and not split further;
    0.0 for a stand-in.
    """
    _require_at_least("world_size", world_size, 1)
    _require_at_least("len(samples)", len(samples), 1)
    return len(micro_batch) * world_size / len(samples) if micro_batch.weighted else 0.0


def _effective(global_batch: int, length: int) -> int:
    """A step takes at most what one epoch has, however large the group is."""
    _require_at_least("global_batch", global_batch, 1)
    return min(global_batch, length)


@lru_cache(maxsize=256)  # most steps of a group have the same number of samples
def _passes(
    length: int, rank: int, world_size: int, batch_size: int
) -> tuple[tuple[int, int, bool], ...]:
    """The micro-batches of a step of `length` samples, counted from its first: begin, end, and
    whether they are weighted."""
    _require_at_least("batch_size", batch_size, 1)
    _require_at_least("len(samples)", length, 1)
    samples = SampleRange(epoch=0, start=0, stop=length)
    own, largest = (
        share(samples, rank=r, world_size=world_size, batch_size=batch_size) for r in (rank, 0)
    )
    count = -(-len(largest) // batch_size)
    stand_in = 0, min(_LEAST_SAMPLES, batch_size, length), False
    pieces = (_piece(own.start, own.stop, index, count, batch_size) for index in range(count))
    return tuple((start, stop, True) if start < stop else stand_in for start, stop in pieces)


def _piece(start: int, stop: int, index: int, parts: int, batch_size: int) -> tuple[int, int]:
    """Piece `index` of [start, stop), cut into at most `parts`; empty if it has none.

    With batches of three or more, any number of samples can be cut into pieces of two and more.
    With batches of two an odd share would leave one over, so samples are dealt in pairs.
    """
    length = stop - start
    unit = 2 if batch_size == 2 else 1
    least = 1 if batch_size <= 2 else _LEAST_SAMPLES
    units = -(-length // unit)
    used = max(1, min(parts, units // least))
    if index >= used:
        return stop, stop
    first, last = _split(units, index, used)
    return start + first * unit, min(start + last * unit, stop)


def _split(count: int, index: int, parts: int) -> tuple[int, int]:
    """Part `index` of [0, count) cut into `parts` contiguous ones, the larger ones first."""
    size, larger = divmod(count, parts)
    first = index * size + min(index, larger)
    return first, first + size + (index < larger)


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
