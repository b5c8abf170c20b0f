"""Keys of etcd are shown as text, even those that other programs wrote."""

from __future__ import annotations

import pytest

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.keys import Keys


@pytest.mark.parametrize("namespace", ["", "test/"])
def test_a_key_comes_back_as_it_was_written(namespace: str) -> None:
    keys = Keys(namespace)
    assert keys.entry(pb.KeyValue(key=keys.encode("elastic/j/nodes/ü"))).key == "elastic/j/nodes/ü"


def test_a_key_that_is_not_utf_8_is_shown_escaped() -> None:
    """Another program wrote this key below ours; a watch must not end at it."""
    entry = Keys("").entry(pb.KeyValue(key=b"elastic/j/nodes/\xff"))
    assert entry.key == "elastic/j/nodes/\\xff"
