"""A document is read into the fields that its dataclass has, and a wrong one is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from elastic.core.documents import Unreadable, parse, read, to_json


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Whole:
    name: str
    count: int
    at: float
    is_last: bool = False
    notes: Mapping[str, Any] = ()  # type: ignore[assignment]
    names: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()


WHOLE = Whole(
    name="n",
    count=2**70,
    at=1.5,
    is_last=True,
    notes={"any": [1, None]},
    names=("a", ""),
    parts=(Part(name="p", size=1), Part(name="q")),
)


def test_a_document_is_read_as_it_was_written() -> None:
    assert read(Whole, parse(to_json(WHOLE))) == WHOLE


def changed(**fields: Any) -> dict[str, Any]:
    return {**parse(to_json(WHOLE)), **fields}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": 1}, "'name' in the document is of type int where str is expected"),
        ({"name": "\ud800"}, "'name' in the document is not a valid text"),
        ({"name": "123456"}, "'name' in the document is not a valid text"),
        ({"names": ["1", "123456"]}, r"'names\[1\]' in the document is not a valid text"),
        ({"count": True}, "'count' in the document is of type bool where int"),
        ({"count": -1}, "'count' in the document is negative: -1"),
        ({"count": 2**80}, "'count' in the document is too large"),
        ({"at": "1"}, "'at' in the document is of type str where float"),
        ({"at": float("nan")}, "'at' in the document is not a valid time: nan"),
        ({"is_last": 1}, "'is_last' in the document is of type int where bool"),
        ({"notes": []}, "'notes' in the document is of type list where dict"),
        ({"parts": {}}, "'parts' in the document is of type dict where list"),
        ({"parts": [[]]}, r"'parts\[0\]' in the document is of type list where dict"),
        ({"parts": [{"name": "p"}]}, r"parts\[0\] in the document lacks 'size'"),
        ({"parts": [{"name": "p", "size": None}]}, r"'size' in parts\[0\] in the document is of"),
    ],
)
def test_a_wrong_value_is_refused_and_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Unreadable, match=named):
        read(Whole, changed(**fields), most={"name": 5, "names": 5, "count": 2**75})


def test_only_fields_that_were_added_later_may_be_missing() -> None:
    document = changed()
    del document["names"]
    assert read(Whole, document, added=("names",)).names == ()
    with pytest.raises(Unreadable, match="m lacks 'names'"):
        read(Whole, document, "m", added=("parts",))


def test_unknown_fields_are_ignored_where_a_kind_is_not_exact() -> None:
    document = changed(colour="blue", parts=[{**asdict(Part(name="p")), "colour": "red"}])
    assert read(Whole, document).parts == (Part(name="p"),)
    with pytest.raises(Unreadable, match="m has unknown keys: colour"):
        read(Whole, document, "m", exact=(Whole,))
    with pytest.raises(Unreadable, match=r"parts\[0\] in m has unknown keys: colour"):
        read(Whole, document, "m", exact=(Part,))


def test_a_whole_number_is_an_instant_where_no_kind_is_exact() -> None:
    found = read(Whole, changed(at=2))
    assert (found.at, type(found.at)) == (2.0, float)
    with pytest.raises(Unreadable, match="'at' in m is of type int where float"):
        read(Whole, changed(at=2), "m", exact=(Whole,))


@pytest.mark.parametrize("value", [b"", b"\xff", "", "{", b"[" * 100_000])
def test_what_is_not_json_is_refused(value: bytes | str) -> None:
    with pytest.raises(Unreadable, match="not JSON"):
        parse(value)


@pytest.mark.parametrize("value", [b"[]", b"1", b"null", '"x"'])
def test_what_is_no_object_is_refused(value: bytes | str) -> None:
    with pytest.raises(Unreadable, match="not a JSON object"):
        parse(value)
