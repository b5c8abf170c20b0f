"""Decides which samples each step, rank and micro-batch consumes, and with which weight.

Each epoch has a random order that is evaluated index by index. The state of the data is a
DataPosition in it, whatever the world size: a step takes the next `global_batch` positions, and
only then are they divided among the current ranks. So a change of world size neither repeats nor
skips a sample.

BatchNorm refuses a batch with one value per channel in training. So no step, share or micro-batch
has a single sample where that can be avoided. A rank without samples gets a stand-in. Ranks with
samples may have different numbers of micro-batches, since only the last one of each communicates.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_LEAST_SAMPLES = 2  # the smallest batch that BatchNorm accepts


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """How much of the data is consumed: the first `cursor` samples of epoch `epoch` (from 0)."""

    epoch: int = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.cursor < 0:  # runs at every step: this check saves two calls
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
    """Positions [start, stop) for one forward and backward pass. `weighted` is False for a
    stand-in, whose loss has weight zero."""

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
        """Samples per step of a group of `world_size` workers: always `size`."""
        _require_at_least("world_size", world_size, 1)
        return self.size


BatchPolicy: TypeAlias = PerWorkerBatch | FixedGlobalBatch


def next_range(
    position: DataPosition, *, length: int, global_batch: int, drop_last: bool = False
) -> SampleRange:
    """The samples of the step after `position`: never none, never more than one epoch has.

    An epoch's last step has the remaining samples of `length`. Where that would be a single one,
    the step before leaves it a second one. With `drop_last` a remainder is skipped and the step
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
    """The part of `samples` that `rank` (from 0) takes. It is empty if there are too few.

    Shares are contiguous and in rank order. They differ by at most one sample (with batches of
    two by a pair), and the larger ones come first. None has a single sample where that can be
    avoided. ValueError unless 0 <= rank < world_size.
    """
    _require_at_least("rank", rank, 0)
    _require_at_least("world_size", world_size, rank + 1)
    _require_at_least("batch_size", batch_size, 1)
    start, stop = _piece(samples.start, samples.stop, rank, world_size, batch_size)
    return SampleRange(epoch=samples.epoch, start=start, stop=stop)


def micro_batches(
    samples: SampleRange, *, rank: int, world_size: int, batch_size: int, equal: bool = False
) -> tuple[MicroBatch, ...]:
    """The micro-batches of `rank`, which divide its share. None is larger than `batch_size`.

    A share is cut into ceil(largest share / batch_size) of them, or into fewer if it has too few
    samples: none has a single one, unless `batch_size` is 1, or the step has one sample, or
    `batch_size` is 2 and the step has an odd number of samples. A rank without samples gets one
    stand-in: the first samples of the step again, with weight zero.

    equal: every rank gets the same number of micro-batches, with stand-ins in place of those that
    its share lacks, as needed where each pass communicates.

    ValueError if `samples` is empty or `rank` is not below `world_size`.
    """
    begin = samples.start
    return tuple(
        MicroBatch(start=begin + first, stop=begin + last, weighted=weighted)
        for first, last, weighted in _passes(len(samples), rank, world_size, batch_size, equal)
    )


def numbers_of_passes(length: int, *, world_size: int, batch_size: int) -> tuple[int, int]:
    """The fewest and the most micro-batches that a rank gets in a step of `length` samples, unless
    they are to be equal."""
    last = world_size - 1
    fewest, most = (len(_passes(length, r, world_size, batch_size, False)) for r in (last, 0))
    return fewest, most


def loss_weight(micro_batch: MicroBatch, samples: SampleRange, *, world_size: int) -> float:
    """The factor on the micro-batch's mean loss that makes the averaged gradient exact.

    A rank sums the gradients of its micro-batches, and DDP divides the sum over ranks by
    `world_size`. With the factor n * world_size / len(samples) for a micro-batch of n samples, the
    result is the mean over all of `samples`. The factor is exactly 1.0 where shares are equal and
    not split further, and 0.0 for a stand-in.
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
    length: int, rank: int, world_size: int, batch_size: int, equal: bool
) -> tuple[tuple[int, int, bool], ...]:
    """The micro-batches of `rank` in a step of `length` samples, as (start, stop, weighted), with
    positions relative to the step's first sample."""
    _require_at_least("batch_size", batch_size, 1)
    _require_at_least("len(samples)", length, 1)
    samples = SampleRange(epoch=0, start=0, stop=length)
    own, largest = (
        share(samples, rank=r, world_size=world_size, batch_size=batch_size) for r in (rank, 0)
    )
    count = -(-len(largest) // batch_size)
    pieces = [_piece(own.start, own.stop, index, count, batch_size) for index in range(count)]
    taken = [(start, stop, True) for start, stop in pieces if start < stop]
    stand_in = 0, min(_LEAST_SAMPLES, batch_size, length), False
    lacking = count - len(taken) if equal else not taken
    return (*taken, *[stand_in] * lacking)


def _piece(start: int, stop: int, index: int, parts: int, batch_size: int) -> tuple[int, int]:
    """Piece `index` of [start, stop), cut into at most `parts` pieces: empty if there are fewer.

    With batches of three or more, any number of samples can be cut into pieces of at least two.
    With batches of two, an odd share would leave one sample over, so samples go in pairs.
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
    """Part `index` of [0, count), which is cut into `parts` contiguous parts, larger ones first."""
    size, larger = divmod(count, parts)
    first = index * size + min(index, larger)
    return first, first + size + (index < larger)


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


_MASK_64 = 0xFFFF_FFFF_FFFF_FFFF
# Odd multipliers: 2**64 / golden ratio, and one of splitmix64's finalizer (Steele et al., 2014).
_MIX_1 = 0x9E37_79B9_7F4A_7C15
_MIX_2 = 0xBF58_476D_1CE4_E5B9

# A pair of rounds shuffles each digit once. Three pairs pass chi-square tests of pairs of indices
# from length 256 on; with fewer values per digit the rounds mix less and more of them are needed.
_ROUND_PAIRS = 3
_ROUND_PAIRS_IF_SHORT = 8
_SHORT_LENGTH = 1024
_WORTH_A_VECTOR = 32  # below, the calls cost more than they save


class Permutation:
    """A bijection of range(length) chosen by `key`, with random access.

    `length` is the number of indices, at least 0; `key` is any integer. Equal arguments give the
    same order on every machine. Raises ValueError if `length` is negative.

    The index is split into two digits, which a Feistel network shuffles alternately. A result
    outside the range is shuffled again until it falls inside (cycle walking). Both methods are from
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5. The
    digits' radices are close to sqrt(length), so at most one index in sqrt(length) walks. This is a
    shuffle for training, not a cipher: the round function is a cheap 64-bit multiply and xorshift.

    Do not change a constant here: a checkpoint holds a position in this order, and another order
    would change the remaining samples of its epoch.
    """

    __slots__ = ("_high_radix", "_length", "_low_radix", "_round_keys")

    def __init__(self, length: int, *, key: int) -> None:
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self._length = length
        self._high_radix = math.isqrt(max(length - 1, 0)) + 1
        self._low_radix = -(-length // self._high_radix)
        pairs = _ROUND_PAIRS_IF_SHORT if length < _SHORT_LENGTH else _ROUND_PAIRS
        self._round_keys = _round_keys(key, pairs)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        """The value at position `index` of the order. IndexError outside range(length)."""
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is not in range({self._length})")
        value = self._shuffle_once(index)
        while value >= self._length:
            value = self._shuffle_once(value)
        return value

    def take(self, spans: Sequence[range]) -> list[list[int]]:
        """The same as `[[self[i] for i in s] for s in spans]`, but much faster for hundreds of
        indices. IndexError outside range(length)."""
        indices: Iterator[int] = iter(self.take_flat(spans).tolist())
        return [list(islice(indices, len(span))) for span in spans]

    def take_flat(self, spans: Sequence[range]) -> npt.NDArray[np.int64]:
        """The same as `take`, with all spans concatenated in one int64 array of shape (n,)."""
        if sum(map(len, spans)) < _WORTH_A_VECTOR:
            return np.array([self[index] for span in spans for index in span], np.int64)
        for span in spans:
            if not 0 <= span.start <= span.stop <= self._length:
                raise IndexError(f"{span} is not within range({self._length})")
        values = self._shuffle_all(
            np.concatenate([np.arange(span.start, span.stop, dtype=np.uint64) for span in spans])
        )
        while (outside := values >= self._length).any():
            values[outside] = self._shuffle_all(values[outside])
        return values.astype(np.int64)

    def _shuffle_all(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """`_shuffle_once` of each value. Unsigned products wrap around, so no mask is needed."""
        high_radix, low_radix = np.uint64(self._high_radix), np.uint64(self._low_radix)
        high, low = np.divmod(values, low_radix)
        for high_key, low_key in self._round_keys:
            high = (high + _mixed(low, high_key)) % high_radix
            low = (low + _mixed(high, low_key)) % low_radix
        shuffled: npt.NDArray[np.uint64] = high * low_radix + low
        return shuffled

    def _shuffle_once(self, value: int) -> int:
        """A bijection of range(high_radix * low_radix), which is a little larger than length."""
        # The round function is written out twice: calls would double the time of the inner loop.
        high_radix, low_radix = self._high_radix, self._low_radix
        high, low = divmod(value, low_radix)
        for high_key, low_key in self._round_keys:
            mixed = (low ^ high_key) * _MIX_1 & _MASK_64
            mixed = (mixed ^ mixed >> 32) * _MIX_2 & _MASK_64
            high = (high + (mixed >> 32)) % high_radix
            mixed = (high ^ low_key) * _MIX_1 & _MASK_64
            mixed = (mixed ^ mixed >> 32) * _MIX_2 & _MASK_64
            low = (low + (mixed >> 32)) % low_radix
        return high * low_radix + low


def epoch_key(seed: int, epoch: int) -> int:
    """The permutation key of `epoch` (from 0) of a job seeded with `seed`: 64 bits.

    Seed and epoch are hashed: with `seed + epoch`, neighbouring seeds would share orders.
    ValueError if `epoch` is negative.
    """
    if epoch < 0:
        raise ValueError(f"epoch must be at least 0, got {epoch}")
    return int.from_bytes(hashlib.shake_128(b"epoch %d %d" % (seed, epoch)).digest(8), "little")


def _mixed(digits: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    half = np.uint64(32)
    mixed = (digits ^ np.uint64(key)) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> half)) * np.uint64(_MIX_2)
    return mixed >> half


def _round_keys(key: int, pairs: int) -> tuple[tuple[int, int], ...]:
    """`pairs` pairs of 64-bit round keys, derived from `key`."""
    words = hashlib.shake_128(b"permutation %d" % key).digest(16 * pairs)
    return tuple((high, low) for high, low in struct.iter_unpack("<QQ", words))
