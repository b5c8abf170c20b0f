"""Describes tensors without their values, so that members and checkpoints can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import xxhash

from elastic.checkpoint import documents
from elastic.checkpoint.documents import Json
from elastic.errors import ConfigurationError

Place = Literal["cpu", "device"]

# Element types and their names in a safetensors header. Complex ones are stored as pairs of real
# numbers, since the format has only one complex type.
STORED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
REAL_PART = {
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*STORED_AS, *REAL_PART)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, element type ("float32") and shape of a tensor, and where it is kept.

    place: "cpu" for what stays in host memory (states of CPU generators, the step count of Adam),
    "device" for the session's device. Comparisons ignore it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place = field(default="device", compare=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type. Raises ConfigurationError if it cannot be stored."""
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"{self.name} has elements of type {self.dtype}, which cannot be stored; "
                f"convert it to one of {', '.join(DTYPES)}"
            )
        return DTYPES[self.dtype]

    @property
    def element_count(self) -> int:
        """1 for a shape of (), 0 for an empty tensor."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return self.element_count * self.element_bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def describe(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """Return the tensors' specs, sorted by name: in the same order on every member."""
    return tuple(
        TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            place="cpu" if tensor.device.type == "cpu" else "device",
        )
        for name, tensor in sorted(tensors.items())
    )


def to_table(specs: Sequence[TensorSpec]) -> list[Json]:
    """Return the specs as JSON, for another member."""
    return [[s.name, s.dtype, list(s.shape), s.place] for s in specs]


def from_table(table: Sequence[tuple[str, str, Sequence[int], Place]]) -> tuple[TensorSpec, ...]:
    """Return the specs that `to_table` turned into JSON."""
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape), place=place)
        for name, dtype, shape, place in table
    )


def signature(specs: Sequence[TensorSpec]) -> int:
    """Return 64 bits (xxh3) that are equal on two members whose specs are equal."""
    in_order = sorted(specs, key=lambda spec: spec.name)
    rows: list[object] = [[spec.name, spec.dtype, list(spec.shape)] for spec in in_order]
    return xxhash.xxh3_64_intdigest(documents.encode({"tensors": rows}))


def first_differences(
    mine: Sequence[TensorSpec], theirs: Sequence[TensorSpec], limit: int = 3
) -> list[str]:
    """Return up to `limit` sentences on how two tables differ, by name; none if they are equal."""
    here = {spec.name: spec for spec in mine}
    there = {spec.name: spec for spec in theirs}
    differences: list[str] = []
    for name in sorted(here.keys() | there.keys()):
        if len(differences) == limit:
            break
        if here.get(name) != there.get(name):
            differences.append(_difference(name, here.get(name), there.get(name)))
    return differences


def _difference(name: str, mine: TensorSpec | None, theirs: TensorSpec | None) -> str:
    if mine is None:
        return f"{name} ({theirs}) is missing here"
    if theirs is None:
        return f"{name} ({mine}) is only here"
    return f"{name} is {mine} here and {theirs} there"
