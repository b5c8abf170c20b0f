"""Keys of etcd as the store shows them, those that others wrote too."""

from __future__ import annotations

import pytest

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.keys import Keys


@pytest.mark.parametrize("namespace", ["", "test/"])
def test_a_key_comes_back_as_it_was_written(namespace: str) -> None:
    keys = Keys(namespace)
    assert keys.entry(pb.KeyValue(key=keys.encode("elastic/j/nodes/ü"))).key == "elastic/j/nodes/ü"


def test_a_key_that_is_no_text_is_shown_all_the_same() -> None:
    """It stands below ours, and must not end who follows them."""
    entry = Keys("").entry(pb.KeyValue(key=b"elastic/j/nodes/\xff"))
    assert entry.key == "elastic/j/nodes/\\xff"
