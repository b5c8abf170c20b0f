"""Reads JSON documents into dataclasses, by the names and types of their fields."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from elastic.core.legible import is_representable_time, is_utf8_encodable

D = TypeVar("D")
_JSON: dict[Any, type] = {tuple: list, Mapping: dict}
"""The types of JSON for those of dataclasses; any other has itself, and a dataclass an object."""


class Unreadable(ValueError):
    """Not a document of this kind: another version or another program has written it."""


def to_json(noun: Any) -> bytes:
    return json.dumps(dataclasses.asdict(noun), sort_keys=True).encode()


def parse(value: bytes | str) -> dict[str, Any]:
    """All fields of a JSON object. Raises Unreadable."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON: {value[:80]!r}") from error
    if type(found) is not dict:
        raise Unreadable(f"not a JSON object: {value[:80]!r}")
    return found


def read(
    kind: type[D],
    document: Mapping[str, Any],
    where: str = "the document",
    *,
    added: Collection[str] = (),
    most: Mapping[str, float] = MappingProxyType({}),
    exact: Collection[type] = (),
) -> D:
    """The object with the document's fields. Raises Unreadable, which names the field in `where`.

    Whole numbers are not negative; other numbers are instants in Unix seconds; texts can be sent
    on as UTF-8. Fields that only a newer version knows are ignored.

    added: fields that older versions do not write, which have their defaults then. most: the
    largest number, or the most characters, of fields. exact: kinds that have no other fields; then
    no instant is a whole number.
    """
    hints, values = _hints(kind), {}
    if kind in exact and (unknown := sorted(document.keys() - hints.keys())):
        raise Unreadable(f"{where} has unknown keys: {', '.join(unknown)}")
    for name, hint in hints.items():
        if name in document:
            limit = most.get(name, math.inf)
            values[name] = _value(document[name], hint, name, where, limit, exact)
        elif name not in added:
            raise Unreadable(f"{where} lacks {name!r}")
    return kind(**values)


_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def _value(
    found: Any, hint: Any, name: str, where: str, most: float, exact: Collection[type]
) -> Any:
    plain = get_origin(hint) or hint
    is_object, what = dataclasses.is_dataclass(plain), f"{name!r} in {where}"
    expected = dict if is_object else _JSON.get(plain, plain)
    is_whole_instant = plain is float and type(found) is int and not exact
    if type(found) is not expected and not is_whole_instant:
        given = type(found).__name__
        raise Unreadable(f"{what} is of type {given} where {expected.__name__} is expected")
    if plain is tuple:
        of = get_args(hint)[0]
        return tuple(_value(x, of, f"{name}[{i}]", where, most, exact) for i, x in enumerate(found))
    if is_object:
        return read(cast(Any, hint), found, f"{name} in {where}", exact=exact)
    if plain is int and not 0 <= found <= most:
        raise Unreadable(f"{what} is {'negative' if found < 0 else 'too large'}: {found!r:.40}")
    if plain is float and not is_representable_time(found):
        raise Unreadable(f"{what} is not a valid time: {found!r:.40}")
    if plain is str and not (len(found) <= most and is_utf8_encodable(found)):
        raise Unreadable(f"{what} is not a valid text: {found!r:.40}")
    return float(found) if plain is float else found
