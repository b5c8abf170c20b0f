"""A manifest is read as it was written; anything else is damage."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import manifest as manifests
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.manifest import Manifest, from_json, to_json
from elastic.errors import CheckpointDamaged
from tests.fuzzed_documents import documents, json_texts, may_be_refused, thoroughly

_checksum = manifests._checksum
MANIFEST = Manifest(
    job="digits",
    step=1200,
    generation=7,
    world_size=4,
    epoch=2,
    cursor=640,
    learning_rate={"factor": 2.5, "ramp": [1, 2.0, None], "policy": "linear"},
    created_unix_s=1.75e9,
    files=(
        FileDigest(name="shard-00000-of-00001.safetensors", size_bytes=12, xxh3_128="0" * 32),
        FileDigest(name="structure.json", size_bytes=3, xxh3_128="ab" * 16),
    ),
)


def test_a_manifest_survives_a_round_trip() -> None:
    assert from_json(to_json(MANIFEST), "m") == MANIFEST


def test_a_manifest_of_an_older_version_keeps_its_version() -> None:
    older = replace(MANIFEST, format_version=1)
    assert from_json(to_json(older), "m") == older


def test_equal_manifests_are_equal_bytes() -> None:
    reordered = replace(MANIFEST, learning_rate=dict(reversed(MANIFEST.learning_rate.items())))
    assert to_json(reordered) == to_json(MANIFEST)


@given(st.data())
def test_every_flipped_bit_is_detected(data: st.DataObject) -> None:
    content = bytearray(to_json(MANIFEST))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointDamaged, match=r"somewhere/manifest\.json"):
        from_json(bytes(content), "somewhere/manifest.json")


def test_every_truncation_is_detected() -> None:
    content = to_json(MANIFEST)
    for length in range(len(content)):
        with pytest.raises(CheckpointDamaged, match="where"):
            from_json(content[:length], "where")


def _changed(**changes: Any) -> bytes:
    document = json.loads(to_json(MANIFEST)) | changes
    return json.dumps({key: value for key, value in document.items() if value != "gone"}).encode()


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"format_version": 3}, "format version 3"),
        ({"format_version": 0}, "format version 0"),
        ({"format_version": "1"}, "'format_version'.*type str where int"),
        ({"step": "gone"}, "lacks 'step'"),
        ({"step": True}, "'step'.*type bool where int"),
        ({"step": -1}, "'step'.*negative"),
        ({"step": 1201}, "checksum"),
        ({"cursor": 1.5}, "'cursor'.*type float where int"),
        ({"surprise": 1}, "unknown keys: surprise"),
        ({"learning_rate": []}, "'learning_rate'.*type list where dict"),
        ({"files": [1]}, r"files\[0\].*type int where dict"),
        ({"files": [{"name": "structure.json", "size_bytes": 1}]}, "lacks 'xxh3_128'"),
        (
            {"files": [{"name": "structure.json", "size_bytes": 1, "xxh3_128": "zz"}]},
            "128-bit digest",
        ),
        ({"created_unix_s": "gone"}, "lacks 'created_unix_s'"),
        ({"manifest_xxh3_128": "gone"}, "lacks 'manifest_xxh3_128'"),
    ],
)
def test_a_wrong_field_is_named_in_the_error(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(CheckpointDamaged, match=wrong) as caught:
        from_json(_changed(**changes), "root/manifest.json")
    assert "root/manifest.json" in str(caught.value)


@pytest.mark.parametrize("name", ["../secret", "a/b", ".hidden", "", "..", "/etc/passwd", "a\\b"])
def test_a_file_outside_the_checkpoint_is_refused(name: str) -> None:
    outside = replace(MANIFEST, files=(replace(MANIFEST.files[0], name=name),))
    with pytest.raises(CheckpointDamaged, match="is not the name of a file"):
        from_json(to_json(outside), "m")


def test_a_file_listed_twice_is_refused() -> None:
    twice = replace(MANIFEST, files=MANIFEST.files[:1] * 2)
    with pytest.raises(CheckpointDamaged, match="lists a file twice"):
        from_json(to_json(twice), "m")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b'{"a":NaN}', b'{"a":1e999}', b'{"a":1,"a":1}', b"[" * 9**5],
)
def test_content_that_is_not_strict_json_is_damage(content: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        from_json(content, "m")


def test_a_manifest_with_nan_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(replace(MANIFEST, learning_rate={"factor": float("nan")}))


class _AnyChecksum(str):
    """Equals every other string."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, str)


def _any_checksum(document: Mapping[str, object]) -> str:
    return _AnyChecksum(_checksum(document))


def _with_learning_rate(text: str) -> bytes:
    return to_json(MANIFEST).replace(b'"linear"', text.encode())


@thoroughly
@given(content=documents(to_json(MANIFEST)))
def test_any_bytes_are_read_as_a_manifest_or_reported_as_damage(content: bytes) -> None:
    with may_be_refused(CheckpointDamaged, naming="root/manifest.json"):
        found = from_json(content, "root/manifest.json")
        assert to_json(from_json(to_json(found), "again")) == to_json(found)


@thoroughly
@given(content=documents(to_json(MANIFEST)) | json_texts().map(_with_learning_rate))
def test_any_document_with_a_right_checksum_is_read_or_reported_as_damage(content: bytes) -> None:
    """The checksum counts as right, so that the checks after it see strange values, too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifests, "_checksum", _any_checksum)
        with may_be_refused(CheckpointDamaged, naming="root/manifest.json"):
            found = from_json(content, "root/manifest.json")
            to_json(found)
            datetime.datetime.fromtimestamp(found.created_unix_s, tz=datetime.timezone.utc)
