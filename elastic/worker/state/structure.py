"""The document that says which tensors a checkpoint has and what surrounds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.checkpoint import documents
from elastic.checkpoint.documents import Json
from elastic.errors import CheckpointDamaged
from elastic.worker.state.tensor_specs import DTYPES, TensorSpec

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The table of tensors, the skeleton they belong in, and any JSON the caller adds."""

    specs: tuple[TensorSpec, ...]
    skeleton: Json
    extra: Mapping[str, Json]


def to_json(structure: Structure) -> bytes:
    """Return the document; ValueError or TypeError if `extra` is not plain, finite JSON."""
    return documents.encode(
        {
            "format_version": FORMAT_VERSION,
            "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in structure.specs],
            "skeleton": structure.skeleton,
            "extra": dict(structure.extra),
        }
    )


def from_json(content: bytes, where: str) -> Structure:
    """Parse the document; CheckpointDamaged names the file `where` and what is wrong with it."""
    document = documents.decode(content, where)
    version = documents.field(document, "format_version", int, where)
    if version != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{where} has format version {version}; this version of elastic reads only "
            f"{FORMAT_VERSION}: load it with the version that wrote it"
        )
    if "skeleton" not in document:
        raise CheckpointDamaged(f"{where} lacks 'skeleton'")
    rows = documents.field(document, "tensors", list, where)
    return Structure(
        specs=tuple(_spec(row, f"tensors[{i}] in {where}") for i, row in enumerate(rows)),
        skeleton=document["skeleton"],
        extra=documents.field(document, "extra", dict, where),
    )


def _spec(row: Json, where: str) -> TensorSpec:
    cells: list[Json] = documents.checked(row, list, where)
    if len(cells) != 3:
        raise CheckpointDamaged(f"{where} is not a name, a type and a shape")
    shape: list[Json] = documents.checked(cells[2], list, f"the shape of {where}")
    sizes = tuple(documents.checked(size, int, f"a size of {where}") for size in shape)
    dtype = documents.checked(cells[1], str, f"the type of {where}")
    if dtype not in DTYPES or any(size < 0 for size in sizes):
        raise CheckpointDamaged(f"{where} is an impossible {dtype}{list(sizes)}")
    name = documents.checked(cells[0], str, f"the name of {where}")
    return TensorSpec(name=name, dtype=dtype, shape=sizes)
