"""Strict JSON for the documents beside the shards: any deviation counts as damage."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import NoReturn, TypeAlias, TypeVar

from elastic.core import documents
from elastic.errors import CheckpointDamaged

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
_T = TypeVar("_T")


def encode(document: Mapping[str, object]) -> bytes:
    """Return canonical UTF-8 JSON, the same for equal documents: sorted keys, no NaN, no spaces.

    Raises ValueError for infinities and NaN, TypeError for types that JSON lacks.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def decode(content: bytes, where: str) -> dict[str, Json]:
    """Parse a JSON object. Raises CheckpointDamaged, which names `where` and what is wrong."""
    try:
        document = json.loads(
            content.decode(),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not valid JSON: {error}") from error
    return checked(document, dict, where)


def field(document: Mapping[str, Json], key: str, kind: type[_T], where: str) -> _T:
    """Return `document[key]`. Raises CheckpointDamaged if it is missing or of another type."""
    if key not in document:
        raise CheckpointDamaged(f"{where} lacks {key!r}")
    return checked(document[key], kind, f"{key!r} in {where}")


def checked(value: object, kind: type[_T], what: str) -> _T:
    """Return a value of exactly this type (a bool is no int), else raise CheckpointDamaged."""
    if type(value) is not kind:
        raise CheckpointDamaged(
            f"{what} is of type {type(value).__name__} where {kind.__name__} is expected"
        )
    return value


def read(
    kind: type[_T],
    document: Mapping[str, Json],
    where: str,
    *,
    added: Collection[str] = (),
    exact: Collection[type],
) -> _T:
    """Return what elastic.core.documents reads. Raises CheckpointDamaged."""
    try:
        return documents.read(kind, document, where, added=added, exact=exact)
    except documents.Unreadable as error:
        raise CheckpointDamaged(str(error)) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond what a float can hold")
    return value


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice")
    return document
