"""Converts the core's dataclasses to messages on the wire, and back, by the names of their fields.

The protos are the schema. A field of a dataclass has the name of a field of its message; its type
hint says how to convert the value:

    int, float, bool, str, bytes    as they are
    an enum                         its value is the number on the wire; a test checks that
    X | None                        None: the message does not have the field
    tuple[X, ...], a dataclass      a repeated field, a message

What only the message has, of a newer version or for other readers, is ignored.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from elastic.core.membership import Failure, Generation, WorkerStatus
from elastic.v1 import job_pb2 as pb

D = TypeVar("D")
M = TypeVar("M", bound=Message)
_Conversion = Callable[[Any], Any]


class Codec(Generic[D, M]):
    """Converts objects of one dataclass to messages of one kind, and back. Make it once: it reads
    the type hints. A dataclass with a field that its message lacks raises KeyError here."""

    def __init__(
        self,
        kind: type[D],
        message: type[M],
        *,
        texts: Mapping[str, int] = MappingProxyType({}),
        without: Collection[str] = (),
    ) -> None:
        """texts: the most characters of those texts that are from a script. They may be of any
        length and may not be valid UTF-8. without: fields that only the dataclass has."""
        self._kind, self._message = kind, message
        fields = [one for one in dataclasses.fields(cast(Any, kind)) if one.init]
        self._names = [one.name for one in fields if one.name not in without]
        self._values_of = attrgetter(*self._names)  # a tuple: there are several
        self._optional: list[str] = []
        self._to: dict[str, _Conversion] = {
            name: functools.partial(_text, most=most) for name, most in texts.items()
        }
        self._from: dict[str, _Conversion] = {}
        hints = get_type_hints(kind)
        for name in self._names:
            field, hint = message.DESCRIPTOR.fields_by_name[name], hints[name]
            if type(None) in get_args(hint):
                self._optional.append(name)
                (hint,) = (one for one in get_args(hint) if one is not type(None))
            if (conversions := _conversions(hint, field)) is not None:
                self._to[name], self._from[name] = conversions

    def to_pb(self, noun: D) -> M:
        return self._message(**self.to_dict(noun))

    def to_dict(self, noun: D) -> dict[str, Any]:
        """The message's fields. Messages in messages are dictionaries, too: protobuf converts them
        faster than Python makes them. None is for a field that the message does not have."""
        values = dict(zip(self._names, self._values_of(noun)))  # noqa: B905 - `strict` is slow
        for name, convert in self._to.items():
            values[name] = convert(values[name])
        return values

    def from_pb(self, message: M) -> D:
        """Raises ValueError for an enum's number that only a newer version knows."""
        values = dict(zip(self._names, self._values_of(message)))  # noqa: B905 - as above
        for name, convert in self._from.items():
            values[name] = convert(values[name])
        for name in self._optional:
            if not message.HasField(name):
                values[name] = None
        return self._kind(**values)


def _conversions(hint: Any, field: Any) -> tuple[_Conversion, _Conversion] | None:
    """How to convert a value to the wire, and back; None: it is the same there."""
    if get_origin(hint) is tuple:
        of_one = _conversions(get_args(hint)[0], field)
        if of_one is None:
            return list, tuple
        to, back = of_one
        return lambda values: [*map(to, values)], lambda found: tuple(map(back, found))
    if dataclasses.is_dataclass(hint):
        codec = Codec(cast(Any, hint), GetMessageClass(field.message_type))
        return codec.to_dict, codec.from_pb
    if issubclass(hint, enum.Enum):
        return attrgetter("value"), hint
    return None


def _text(text: str, *, most: int) -> str:
    """Replace lone surrogates, which an exception's text may hold and a message may not; cut the
    middle out of text that is too long for a message."""
    if len(text) > most:
        left_out = f"[{len(text) - most} characters are left out here]"
        text = f"{text[: most // 2]}\n{left_out}\n{text[-(most // 2) :]}"
    return text.encode(errors="replace").decode()


_LINE, _TEXT = 10_000, 100_000  # characters
_GENERATION = Codec(Generation, pb.Generation)
_STATUS = Codec(WorkerStatus, pb.WorkerStatus)
_FAILURE = Codec(
    Failure,
    pb.Failure,
    texts={
        **{"signature": _LINE, "message": _LINE},
        **{"traceback": _TEXT, "log_tail": _TEXT, "place": _TEXT},
    },
)
generation_from_pb = _GENERATION.from_pb
status_to_pb, status_from_pb = _STATUS.to_pb, _STATUS.from_pb
failure_to_pb, failure_from_pb = _FAILURE.to_pb, _FAILURE.from_pb


@functools.lru_cache(maxsize=4)
def generation_to_pb(generation: Generation) -> pb.Generation:
    """The message for all who get this generation: do not change it. With 1,000 members it takes
    ten times as long to make one as to find it."""
    return _GENERATION.to_pb(generation)
