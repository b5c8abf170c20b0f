"""Computes a number that is equal for equal tensors, at the speed of their memory."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from elastic.worker.state.tree import memory_of

_ON_DEVICE_ELEMENTS = 2**22
_COPIED_BYTES = 2**22
LEAST_SAMPLED_BYTES = 2**20
SAMPLED_BYTES, SAMPLED_OF = 2**8, 2**17
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view.restype = ctypes.py_object
_MASK = 2**63 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
"""An odd number without a pattern: 2^64 divided by the golden ratio, as a signed integer."""


def digest_of(tensors: Iterable[torch.Tensor], extra: bytes = b"") -> int:
    """Return 63 bits of the tensors' content, in order, and of `extra`; never 0.

    Host tensors are hashed in place (xxh3). A device's tensors are summed there, each word weighted
    by its position, so that only 8 bytes of each cross the bus.
    """
    hasher = xxhash.xxh3_64(extra)
    sums = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.device.type != "cpu":
            sums.append(_weighted_sum(bytes_of(tensor)))
            continue
        _read(tensor, hasher)
    if sums:
        hasher.update(torch.stack(sums).cpu().numpy().tobytes())
    return (hasher.intdigest() & _MASK) or 1


def digest_by_name(tensors: Mapping[str, torch.Tensor], before: ReadBefore | None = None) -> int:
    """Return 63 bits of the tensors' names and content, whatever their order.

    The digest of tensors in two mappings is `combined` from those of each. before: what need not be
    read again.
    """
    before = before or ReadBefore()
    signs = {name: before.sign(tensor) for name, tensor in tensors.items()}
    known = {name: before.recall(name, tensor, signs[name]) for name, tensor in tensors.items()}
    hashers = {name: xxhash.xxh3_64(name.encode()) for name in tensors if known[name] is None}
    on_device: dict[str, torch.Tensor] = {}
    for name, hasher in hashers.items():
        tensor = tensors[name]
        if not tensor.numel():
            continue
        if tensor.device.type != "cpu":
            on_device[name] = _weighted_sum(bytes_of(tensor))
        else:
            _read(tensor, hasher)
    if on_device:
        sums = torch.stack(list(on_device.values())).cpu().numpy()
        for name, number in zip(on_device, sums, strict=True):
            hashers[name].update(number.tobytes())
    read = {name: hasher.intdigest() for name, hasher in hashers.items()}
    for name, number in read.items():
        before.note(name, tensors[name], signs[name], number)
    return sum(read.get(name) or known[name] or 0 for name in tensors) & _MASK


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    sign: object
    at: int
    """Where the sample of each part begins, in bytes."""
    sample: int
    number: int


class ReadBefore:
    """Digests of large tensors that nothing writes to, such as those of a frozen model, so that the
    time to find that members agree does not grow with them.

    A tensor need not be read again if it is one of `unwritten`, its version and place are as they
    were, and so is a sample of its content: writes through `.data` move no version, but most change
    all of a tensor.
    """

    def __init__(self) -> None:
        self.unwritten: Collection[tuple[object, ...]] = ()
        """Of the tensors that nothing is known to write to, what `memory_of` returns."""
        self._readings: dict[str, _Reading] = {}
        self._draw = random.Random()  # the common generator is the script's

    def sign(self, tensor: torch.Tensor) -> object:
        """Return what is equal as long as nothing is seen to write to the tensor; None: it must be
        read each time."""
        if tensor.numel() * tensor.element_size() < LEAST_SAMPLED_BYTES:
            return None
        place = memory_of(tensor)
        if place not in self.unwritten or tensor.is_inference() or not tensor.is_contiguous():
            return None
        return place, tensor._version

    def recall(self, name: str, tensor: torch.Tensor, sign: object) -> int | None:
        """Return the number that was noted; None: the tensor must be read."""
        reading = self._readings.get(name)
        if reading is None or sign != reading.sign:
            return None
        return reading.number if _sample(tensor, reading.at) == reading.sample else None

    def note(self, name: str, tensor: torch.Tensor, sign: object, number: int) -> None:
        """sign: that before it was read. Something may have written to it meanwhile."""
        self._readings.pop(name, None)
        if sign is not None:
            at = self._draw.randrange(SAMPLED_OF - SAMPLED_BYTES)  # each member looks elsewhere
            sample = _sample(tensor, at)
            self._readings[name] = _Reading(sign=sign, at=at, sample=sample, number=number)

    def forget(self) -> None:
        """What was read may have been written to."""
        self._readings.clear()


def _sample(tensor: torch.Tensor, at: int) -> int:
    """Return a digest of a few bytes of each part of a contiguous tensor's content."""
    if tensor.device.type != "cpu":
        content = bytes_of(tensor)
        rows = content.numel() // SAMPLED_OF
        start = content.storage_offset() + at
        return digest_of([content.as_strided((rows, SAMPLED_BYTES), (SAMPLED_OF, 1), start)])
    size = tensor.numel() * tensor.element_size()
    host = np.frombuffer(_view(tensor.data_ptr(), size, _READ), np.uint8)
    parts = host[: size - size % SAMPLED_OF].reshape(-1, SAMPLED_OF)
    return xxhash.xxh3_64_intdigest(parts[:, at : at + SAMPLED_BYTES].tobytes())


def combined(*digests: int) -> int:
    """Return the digest of what `digests` are of, together; never 0."""
    return (sum(digests) & _MASK) or 1


def _read(tensor: torch.Tensor, hasher: xxhash.xxh3_64) -> None:
    for words in _contents(tensor.detach()):
        # Not by numpy(), after which torch never lets a script resize the tensor.
        hasher.update(_view(words.data_ptr(), words.numel(), _READ))


def _contents(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the content as `bytes_of` does, some rows at a time if they must be copied for that."""
    if tensor.is_contiguous():
        yield bytes_of(tensor)
        return
    row = tensor.numel() * tensor.itemsize // len(tensor)
    room = tensor[:0]
    for rows in torch.split(tensor, max(1, _COPIED_BYTES // row)):
        if len(room) != len(rows):
            room = torch.empty_like(rows, memory_format=torch.contiguous_format)
        yield bytes_of(room.copy_(rows))


def memory_to_fill(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, which must live as long. To write to them moves
    no version counter."""
    words = bytes_of(tensor)
    if not words.numel():
        return memoryview(b"")
    memory: memoryview = _view(words.data_ptr(), words.numel(), _WRITE)
    return memory


def _weighted_sum(content: torch.Tensor) -> torch.Tensor:
    """Return the sum of each word times a number mixed from its position, modulo 2^64."""
    lacks = -content.numel() % 4
    padded = torch.nn.functional.pad(content, (0, lacks)) if lacks else content
    padded = padded.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for start in range(0, padded.numel(), _ON_DEVICE_ELEMENTS):
        words = padded[start : start + _ON_DEVICE_ELEMENTS].to(torch.int64)
        stop = start + words.numel()
        places = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=content.device)
        weights = places * _MULTIPLIER  # mixed: linear ones miss opposite moves of equal distance
        weights ^= weights >> 29
        weights *= _MULTIPLIER
        weights ^= weights >> 32
        total += (words * weights).sum()
    return total


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content as a flat uint8 tensor, which shares a contiguous tensor's memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # A single element counts as contiguous whatever its stride, but view(dtype) needs stride 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
