"""Draws bytes that are no document, are almost one, or are one with strange values in it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

thoroughly = settings(max_examples=5 * settings.default.max_examples)
"""Enough for every strange value in every place of a small document; parsing one takes no time."""

_STRANGE: tuple[str, ...] = (
    "NaN",
    "-Infinity",
    "1e999",
    "1e308",
    "-1",
    "1" + "0" * 400,
    "9" * 5000,  # more digits than Python converts
    str(2**63),
    '"\\ud800"',  # half of a surrogate pair, which JSON allows and UTF-8 does not
    '"\\u0000"',
    '"\\u001b[2J"',
)
_NESTED = tuple(sys.getrecursionlimit() + by for by in (-150, -60, -30, -10, 0, 2000))
"""Depths just below and beyond what a recursive reader or writer can follow."""


@contextlib.contextmanager
def may_be_refused(kind: type[Exception], *, naming: str) -> Iterator[None]:
    """The block may raise only this error, whose text must contain `naming`."""
    try:
        yield
    except kind as error:
        if naming not in str(error):
            raise AssertionError(f"{naming} is not named: {error}") from error


def json_texts() -> st.SearchStrategy[str]:
    """JSON as other programs write it, and text that only looks like JSON."""
    plain = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ).map(json.dumps)
    depths = st.sampled_from(_NESTED)
    nested = depths.map(lambda n: "[" * n + "]" * n) | depths.map(
        lambda n: '{"a":' * n + "1" + "}" * n
    )
    return plain | st.sampled_from(_STRANGE) | nested


def documents(valid: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, any JSON, and the valid document with some of its bytes or values replaced."""
    return st.one_of(
        _with_values_replaced(json.loads(valid)),
        spliced(valid),
        json_texts().map(str.encode),
        st.binary(max_size=64),
    )


def spliced(valid: bytes) -> st.SearchStrategy[bytes]:
    """The valid bytes with a part of them replaced by others, or cut off."""
    place = st.integers(0, len(valid))
    return st.builds(
        lambda start, length, middle: valid[:start] + middle + valid[start + length :],
        place,
        st.integers(0, 12) | st.just(len(valid)),
        st.binary(max_size=6),
    )


def _with_values_replaced(document: Any) -> st.SearchStrategy[bytes]:
    places = list(_places(document, ()))
    one_strange = st.tuples(st.sampled_from(places), st.sampled_from(_STRANGE)).map(
        lambda change: dict([change])
    )
    several = st.dictionaries(st.sampled_from(places), json_texts(), min_size=1, max_size=2)
    return (one_strange | several).map(lambda chosen: _rendered(document, (), chosen).encode())


def _places(node: Any, path: tuple[str | int, ...]) -> Any:
    yield path
    inner = node.items() if isinstance(node, dict) else ()
    for key, value in enumerate(node) if isinstance(node, list) else inner:
        yield from _places(value, (*path, key))


def _rendered(node: Any, path: tuple[str | int, ...], changes: dict[Any, str]) -> str:
    if path in changes:
        return changes[path]
    if isinstance(node, dict):
        pairs = (f"{json.dumps(k)}:{_rendered(v, (*path, k), changes)}" for k, v in node.items())
        return "{" + ",".join(pairs) + "}"
    if isinstance(node, list):
        items = (_rendered(v, (*path, i), changes) for i, v in enumerate(node))
        return "[" + ",".join(items) + "]"
    return json.dumps(node)
