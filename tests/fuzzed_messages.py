"""Draws protobuf messages with any values that their types allow."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
_DEEPEST = 4
_NAMES = ("", "w", "w2", "n1", "n1-1", "n1@0123", "i", "h:1", "\x1b[2J", "../x")


def messages(kind: type[M]) -> st.SearchStrategy[M]:
    return _fields(kind.DESCRIPTOR, 0).map(lambda fields: kind(**fields))


def _fields(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    free = {f.name: _value(f, depth) for f in descriptor.fields if f.containing_oneof is None}
    own = st.fixed_dictionaries({}, optional=free)
    oneofs = [
        st.one_of(*(st.tuples(st.just(f.name), _value(f, depth)) for f in oneof.fields))
        for oneof in descriptor.oneofs
    ]
    if not oneofs:
        return own
    return st.builds(lambda fields, chosen: {**fields, **dict(chosen)}, own, st.tuples(*oneofs))


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = message.fields
        return st.dictionaries(_single(key, depth), _single(value, depth), max_size=3)
    single = _single(field, depth)
    return st.lists(single, max_size=3) if field.is_repeated else single


def _single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        if depth == _DEEPEST:
            return st.just({})
        return _fields(field.message_type, depth + 1)
    kinds = FieldDescriptor
    if field.enum_type is not None:
        return st.sampled_from([v.number for v in field.enum_type.values] + [99])
    if field.cpp_type in (kinds.CPPTYPE_DOUBLE, kinds.CPPTYPE_FLOAT):
        return st.floats() if field.cpp_type == kinds.CPPTYPE_DOUBLE else st.floats(width=32)
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == kinds.CPPTYPE_STRING:
        text = st.sampled_from(_NAMES) | st.text(max_size=8).filter(_is_utf8_encodable)
        return text if field.type == kinds.TYPE_STRING else st.binary(max_size=8)
    bits = 32 if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 64
    signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.integers(0, 5) | st.integers(least, most)


def _is_utf8_encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
