"""The core's data classes survive the wire unchanged."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from hypothesis import given
from hypothesis import strategies as st

import elastic
from elastic.core import membership as core
from elastic.core import whereabouts
from elastic.rpc import codec
from elastic.rpc.framing import encode
from elastic.rpc.stacks import whereabouts_from_pb
from elastic.v1 import job_pb2 as pb
from elastic.v1 import stacks_pb2

_UNSIGNED_32 = st.integers(0, 2**32 - 1)
_UNSIGNED_64 = st.integers(0, 2**64 - 1)
_BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "code": st.integers(-(2**31), 2**31 - 1),
    "pid": st.integers(-(2**63), 2**63 - 1),
}
_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: _UNSIGNED_64,
    int | None: st.none() | _UNSIGNED_32,
    bool: st.booleans(),
    str: st.text(max_size=5),
    tuple[str, ...]: st.lists(st.text(max_size=5), max_size=3).map(tuple),
}


def nouns(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances with every field filled in, including fields that are added later."""
    derived = {field.name for field in dataclasses.fields(kind) if not field.init}
    for name, hint in get_type_hints(kind).items():
        if name not in fields and name not in derived:
            known = _BY_NAME.get(name, _BY_TYPE.get(hint))
            fields[name] = known if known is not None else st.sampled_from(list(hint))
    return st.builds(kind, **fields)


MEMBERS = nouns(core.Member, slot=_UNSIGNED_32)
GENERATIONS = nouns(core.Generation, members=st.lists(MEMBERS, max_size=3).map(tuple))


@given(generation=GENERATIONS)
def test_generations_survive_the_wire(generation: core.Generation) -> None:
    assert codec.generation_from_pb(wire(codec.generation_to_pb(generation))) == generation


@given(status=nouns(core.WorkerStatus))
def test_statuses_survive_the_wire(status: core.WorkerStatus) -> None:
    assert codec.status_from_pb(wire(codec.status_to_pb(status))) == status


@given(failure=nouns(core.Failure))
def test_failures_survive_the_wire(failure: core.Failure) -> None:
    assert codec.failure_from_pb(wire(codec.failure_to_pb(failure))) == failure


def test_undecodable_text_of_a_script_is_replaced() -> None:
    """Python reads undecodable bytes as lone surrogates, which protobuf refuses."""
    failure = core.Failure(
        worker="w", kind=core.FailureKind.EXCEPTION, message="no file '\udcff'", traceback="\udcff"
    )
    received = codec.failure_from_pb(wire(codec.failure_to_pb(failure)))
    assert (received.message, received.traceback) == ("no file '?'", "?")


def test_a_failure_with_long_texts_is_shortened_to_fit_into_a_message() -> None:
    """An exception's message may contain a whole tensor."""
    long = "ValueError: " + "7" * 60_000_000 + " is the end"
    failure = core.Failure(
        worker="w",
        kind=core.FailureKind.EXCEPTION,
        signature=long,
        message=long,
        traceback=long,
    )
    message = codec.failure_to_pb(failure)
    assert len(encode(message)) < 1 << 20
    for text in (message.signature, message.message, message.traceback):
        assert text.startswith("ValueError: 7")
        assert "characters are left out" in text
        assert text.endswith("7 is the end")


def test_a_reason_of_a_newer_version_is_refused() -> None:
    message = pb.Generation(number=1, purpose=pb.PURPOSE_TRAIN, reason=99)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="99"):
        codec.generation_from_pb(message)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (core.WorkerPhase, pb.WorkerPhase),
        (core.ChangeReason, pb.ChangeReason),
        (core.Purpose, pb.Purpose),
        (core.FailureKind, pb.FailureKind),
    ],
)
def test_enums_have_the_names_and_numbers_of_the_wire(
    ours: type[enum.Enum], theirs: EnumTypeWrapper
) -> None:
    prefix = {
        "WorkerPhase": "WORKER_PHASE_",
        "ChangeReason": "CHANGE_REASON_",
        "Purpose": "PURPOSE_",
        "FailureKind": "FAILURE_KIND_",
    }[ours.__name__]
    expected = {f"{prefix}UNSPECIFIED": 0, **{prefix + e.name: e.value for e in ours}}
    assert dict(theirs.items()) == expected


def wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_places_and_answers_have_the_numbers_of_the_wire() -> None:
    places = {f"PLACE_{place.name}": place.value for place in whereabouts.Place}
    places["PLACE_UNSPECIFIED"] = places.pop("PLACE_UNKNOWN")
    assert places == dict(stacks_pb2.Place.items())
    answers = {f"ANSWER_{answer.name}": answer.value for answer in whereabouts.Answer}
    assert answers | {"ANSWER_UNSPECIFIED": 0} == dict(stacks_pb2.Answer.items())


def test_a_place_or_an_answer_of_a_newer_version_is_read_as_unknown() -> None:
    newer = stacks_pb2.WorkerStacks.FromString(b"\x18\x63\x20\x63")  # answer and place: 99
    found = whereabouts_from_pb(newer, rank=1, node="b")
    assert found.place is whereabouts.Place.UNKNOWN
    assert found.answer is whereabouts.Answer.NONE


def test_a_field_that_the_message_lacks_is_found_when_the_codec_is_made() -> None:
    with pytest.raises(KeyError, match="node"):
        codec.Codec(core.Member, pb.Failure)


def codecs() -> Iterator[codec.Codec[Any, Any]]:
    package = Path(elastic.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if " = Codec(" in path.read_text():
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            module = importlib.import_module(name)
            yield from (v for v in vars(module).values() if isinstance(v, codec.Codec))


_ON_THE_WIRE: dict[Any, tuple[int, ...]] = {
    bool: (FieldDescriptor.TYPE_BOOL,),
    int: (
        *(FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64),
        *(FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64),
    ),
    float: (FieldDescriptor.TYPE_DOUBLE,),
    str: (FieldDescriptor.TYPE_STRING,),
    bytes: (FieldDescriptor.TYPE_BYTES,),
}


def require_equal_types(kind: Any, message: Descriptor, names: Iterable[str]) -> None:
    for name in names:
        hint, field = get_type_hints(kind)[name], message.fields_by_name[name]
        assert field.is_repeated == (get_origin(hint) is tuple), name
        if type(None) in get_args(hint):
            assert field.has_presence, name
        if get_args(hint):
            hint = get_args(hint)[0]
        if dataclasses.is_dataclass(hint):
            required = [one.name for one in dataclasses.fields(hint) if one.init]
            require_equal_types(hint, field.message_type, required)
        elif issubclass(hint, enum.Enum):
            assert field.type == FieldDescriptor.TYPE_ENUM, name
            prefix = re.sub("(?<!^)(?=[A-Z])", "_", field.enum_type.name).upper()
            numbers = {value.name: value.number for value in field.enum_type.values}
            for one in hint:
                assert numbers[f"{prefix}_{one.name}"] == one.value, name
        else:
            assert field.type in _ON_THE_WIRE[hint], name


def test_every_converted_field_has_the_type_of_its_message() -> None:
    found = list(codecs())
    assert len(found) >= 14
    for one in found:
        require_equal_types(one._kind, one._message.DESCRIPTOR, one._names)
