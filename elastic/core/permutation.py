"""A keyed random order of range(length), evaluated index by index in constant memory.

The index is split into two digits, which a Feistel network shuffles by turns; a result outside the
range is shuffled again until it falls inside (cycle walking). Both are from Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5. The digits' radices are
close to sqrt(length), so at most one index in sqrt(length) walks. This is a shuffle for
training, not a cipher: the round function is a cheap 64-bit multiply and xorshift.

A saved data position means nothing without the order it counts in: changing any constant here
changes that order, and with it what is left of the epoch of every checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

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

    `length` is the number of indices, at least 0; `key` any integer. Equal arguments give the same
    order on every machine. Raises ValueError if `length` is negative.
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
        """The index that stands at `index` in the order; IndexError outside range(length)."""
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} is not in range({self._length})")
        value = self._shuffle_once(index)
        while value >= self._length:
            value = self._shuffle_once(value)
        return value

    def take(self, spans: Sequence[range]) -> list[list[int]]:
        """What stands at each index of each span: as `[[self[i] for i in s] for s in spans]`, but
        much faster for hundreds of them. IndexError outside range(length)."""
        indices: Iterator[int] = iter(self.take_flat(spans).tolist())
        return [list(islice(indices, len(span))) for span in spans]

    def take_flat(self, spans: Sequence[range]) -> npt.NDArray[np.int64]:
        """The same, one span after the other."""
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
        """`_shuffle_once` of each value; unsigned products wrap around, which masks them."""
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

    Hashed, so that neighbouring seeds and epochs do not share orders, as `seed + epoch` would.
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
