"""Between the store's keys and entries and etcd's."""

from __future__ import annotations

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.interface import Change, Entry

_ALL_KEYS = b"\0"


class Keys:
    """All below `namespace`, of which those who use the store know nothing."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def encode(self, key: str) -> bytes:
        """One key."""
        return self._namespace + key.encode()

    def below(self, prefix: str) -> tuple[bytes, bytes]:
        """The range of keys that start with `prefix`: the first, and the first after them."""
        start = self.encode(prefix)
        return start or _ALL_KEYS, _after_prefix(start)

    def entry(self, kv: pb.KeyValue) -> Entry:
        """What is stored."""
        return Entry(
            key=self._decode(kv.key),
            value=kv.value,
            created=kv.create_revision,
            modified=kv.mod_revision,
            lease=kv.lease,
        )

    def change(self, event: pb.Event) -> Change:
        """What has happened."""
        removed = event.type == pb.Event.DELETE
        return Change(
            key=self._decode(event.kv.key),
            revision=event.kv.mod_revision,
            entry=None if removed else self.entry(event.kv),
        )

    def _decode(self, key: bytes) -> str:
        """Others may write keys below ours that are no text; they must not end who follows them."""
        return key[len(self._namespace) :].decode(errors="backslashreplace")


def _after_prefix(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`; 0 is etcd's word for "to the end"."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else _ALL_KEYS
